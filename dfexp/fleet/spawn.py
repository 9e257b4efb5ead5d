"""Server processes: start one so that it is never lost, find all that belong to a server, stop them and prove it.

Every process of a fleet carries a mark in its environment, inherited by whatever it starts: so a server that was
started a moment before its launcher was killed is found again, and so are workers whose parent died.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import psutil

from dfexp.errors import EngineStartError, FleetError
from dfexp.fleet.record import Server
from dfexp.processes import ProcessId

_MARK = "DFEXP_SERVER"
_HEADER = "dfexp: starting server "
_KILL_S = 15.0
_TAIL_BYTES = 2**20


def spawn(server: Server, identity: str, folder: Path) -> tuple[Server, subprocess.Popen[bytes]]:
    """Start a server in its own session; returns it with pid and start stamp. Raises EngineStartError.

    The caller keeps the Popen and polls it, or the process stays a zombie after its end.
    """
    assert server.argv is not None, "only for servers that dfexp runs"
    assert server.log is not None, "they all have a log"
    env = {**os.environ, **server.env, _MARK: f"{identity}/{server.name}"}
    try:
        log = os.open(server.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise EngineStartError(
            f"cannot write the log {server.log}: {error.strerror}. Fix the fleet's folder."
        ) from None
    try:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        os.write(log, f"{_HEADER}{server.name} at {stamp}\n".encode())
        child = subprocess.Popen(
            server.argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env, cwd=folder, start_new_session=True
        )
    except OSError as error:
        raise EngineStartError(f"cannot run {server.argv[0]}: {error.strerror}. Is the program there?") from None
    finally:
        os.close(log)
    found = ProcessId.of(child.pid)
    # A process that has ended already has no stamp any more; as a zombie of ours its pid cannot be used again yet.
    return replace(server, pid=child.pid, process_started=found.started if found else "ended at once"), child


def last_start(log: str | None) -> str:
    """What a server printed since it was last started; the last mebibyte at most."""
    if log is None:
        return ""
    try:
        with Path(log).open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return ""
    return text[max(0, text.rfind(_HEADER)) :]


def members(identity: str, servers: Sequence[Server]) -> dict[str, list[ProcessId]]:
    """Every living process of each server, by its name: first its leader, then all that carry the server's mark."""
    found: dict[str, list[ProcessId]] = {server.name: [] for server in servers}
    for server in servers:
        if server.process is not None and server.process.is_alive():
            found[server.name].append(server.process)
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            owner, _, name = process.environ().get(_MARK, "").partition("/")
            one = ProcessId.of(process.pid) if owner == identity and name in found else None
            if one is not None and one not in found[name]:
                found[name].append(one)
    return found


def rss_bytes(server: Server) -> int | None:
    """Resident memory of a server's process and its children; pages they share are counted in each."""
    if server.process is None or not server.process.is_alive():
        return None
    try:
        leader = psutil.Process(server.process.pid)
        return int(sum(one.memory_info().rss for one in [leader, *leader.children(recursive=True)]))
    except (psutil.Error, OSError):
        return None


def listens(server: Server) -> bool:
    """Whether the port of a server is held by one of its own processes; True where the system does not tell."""
    assert server.process is not None, "only for started servers"
    port = int(server.name.rpartition(":")[2])
    try:
        leader = psutil.Process(server.process.pid)
        for one in [leader, *leader.children(recursive=True)]:
            for connection in one.net_connections("tcp"):
                if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port:
                    return True
    except psutil.NoSuchProcess:
        return False
    except (psutil.Error, OSError):
        return True
    return False


def stop(identity: str, servers: Sequence[Server], drain_s: float) -> list[str]:
    """Stop all processes of these servers, all at the same time; one line per server of what was done.

    SIGTERM to the leaders (workers follow their leader), SIGKILL for everything that is left after `drain_s`. Raises
    FleetError naming the processes that even that did not end.
    """
    before = members(identity, servers)
    for server in servers:
        leader = [one for one in before[server.name] if one == server.process]
        for one in leader or before[server.name]:
            _send(one, signal.SIGTERM)
    everything = [server.process for server in servers if server.process is not None]
    everything += [one for found in before.values() for one in found]
    _gone(everything, drain_s)
    # Looked up again: a worker may have been started in the meantime, or outlive its leader.
    left = members(identity, servers)
    for found in left.values():
        for one in found:
            _kill_group(one)
    everything += [one for found in left.values() for one in found]
    if not _gone(everything, _KILL_S):
        stuck = ", ".join(sorted({str(one.pid) for one in everything if _lingers(one)}))
        raise FleetError(f"processes {stuck} did not end even after SIGKILL (a driver or a disk may hold them).")
    return [f"{server.name}: {_outcome(before[server.name], bool(left[server.name]))}" for server in servers]


def _outcome(found: Sequence[ProcessId], killed: bool) -> str:
    if not found:
        return "was not running"
    pids = ", ".join(str(one.pid) for one in found)
    return f"killed, since it did not stop in time (pid {pids})" if killed else f"stopped (pid {pids})"


def _send(process: ProcessId, number: signal.Signals) -> None:
    """Signal exactly this process; gone is fine."""
    if process.is_alive():
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)


def _kill_group(process: ProcessId) -> None:
    """SIGKILL a process, and its group where it leads one."""
    if process.is_alive():
        with contextlib.suppress(ProcessLookupError):
            if os.getpgid(process.pid) == process.pid:
                os.killpg(process.pid, signal.SIGKILL)
            os.kill(process.pid, signal.SIGKILL)


def _gone(processes: Sequence[ProcessId], timeout_s: float) -> bool:
    """Wait until none of them lives. False when the time is over."""
    end = time.monotonic() + timeout_s
    while any(_lingers(one) for one in processes):
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def _lingers(process: ProcessId) -> bool:
    """Whether a process lives, or is a zombie whose other threads still are on their way out and hold its port."""
    if process.is_alive():
        return True
    try:
        found = psutil.Process(process.pid)
        return bool(found.status() == psutil.STATUS_ZOMBIE and found.num_threads() > 1)
    except (psutil.Error, OSError):
        return False
