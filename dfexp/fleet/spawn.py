"""Server processes: start one so that it is never lost, find all that belong to a server, stop them and prove it.

Every process of a fleet carries a mark in its environment, inherited by whatever it starts: so a server that was
started a moment before its launcher was killed is found again, and so are workers whose parent died.
"""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from subprocess import DEVNULL, Popen

import psutil

from dfexp.engines.base import Server
from dfexp.errors import EngineStartError, FleetError
from dfexp.processes import ProcessId

_MARK = "DFEXP_SERVER"
_KILL_S = 15.0


def spawn(server: Server, identity: str, folder: Path) -> Server:
    """Start a server in its own session; it with pid and start stamp. Raises EngineStartError."""
    assert server.argv, "only for servers that dfexp runs"
    assert server.log, "they all have a log"
    # SPT_NOENV: setproctitle, which SGLang uses, would otherwise write its title over the mark.
    env = {**os.environ, **server.env, _MARK: f"{identity}/{server.name}", "SPT_NOENV": "1"}
    try:
        with open(server.log, "ab", opener=lambda path, flags: os.open(path, flags, 0o600)) as log:
            log.write(f"dfexp: starting server {server.name} at {time.strftime('%Y-%m-%dT%H:%M:%S%z')}\n".encode())
            log.flush()
            log_start = log.tell()
            child = Popen(
                server.argv, stdin=DEVNULL, stdout=log, stderr=log, env=env, cwd=folder, start_new_session=True
            )
    except (OSError, ValueError) as error:  # ValueError: a NUL character in an argument or a variable
        raise EngineStartError(f"cannot run {server.argv[0]} with its log {server.log}: {error}.") from None
    found = ProcessId.of(child.pid)
    threading.Thread(target=child.wait, daemon=True).start()  # reaps it whenever it ends
    stamp = found.started if found else "ended at once"
    return replace(server, pid=child.pid, process_started=stamp, log_start=log_start)


def members(identity: str, servers: Sequence[Server]) -> dict[str, set[ProcessId]]:
    """Every living process of each server by the server's name: its leader, and all that carry its mark."""
    found = {server.name: {server.process} if server.process.is_alive() else set() for server in servers}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            owner, _, name = process.environ().get(_MARK, "").partition("/")
            one = ProcessId.of(process.pid)
            if owner == identity and name in found and one is not None:
                found[name].add(one)
    return found


def owns_port(identity: str, server: Server) -> bool:
    """Whether a process of this server listens on its port: what answers there may be another program."""
    port = int(server.url.rpartition(":")[2])
    for process in members(identity, [server])[server.name]:
        with contextlib.suppress(psutil.Error):
            for link in psutil.Process(process.pid).net_connections("tcp"):
                if link.status == psutil.CONN_LISTEN and link.laddr.port == port:
                    return True
    return False


def age_s(server: Server) -> float | None:
    """Seconds since a server was started; None when its process is gone."""
    with contextlib.suppress(psutil.Error):
        return time.time() - psutil.Process(server.pid).create_time()
    return None


def rss_bytes(server: Server) -> int | None:
    """Resident memory of a server's process and of what it started; None where unknown."""
    with contextlib.suppress(psutil.Error):
        leader = psutil.Process(server.pid)
        return sum(one.memory_info().rss for one in (leader, *leader.children(recursive=True)))
    return None


def stop(identity: str, servers: Sequence[Server], drain_s: float) -> list[str]:
    """Stop all processes of these servers at the same time; one line per server of what was done.

    SIGTERM to the leaders (workers follow their leader), SIGKILL for everything that is left after `drain_s`. Raises
    FleetError naming the processes that even that did not end.
    """
    before = members(identity, servers)
    for server in servers:
        marked = before[server.name]
        _send(marked & {server.process} or marked, signal.SIGTERM)
    everything = {server.process for server in servers}.union(*before.values())
    _wait_gone(everything, drain_s)
    # Looked up again: a worker may have been started in the meantime, or outlive its leader.
    left = members(identity, servers)
    for found in left.values():
        _send(found, signal.SIGKILL)
    stuck = _wait_gone(everything.union(*left.values()), _KILL_S)
    if stuck:
        raise FleetError(f"processes {stuck} did not end even after SIGKILL (a driver or a disk may hold them).")
    said = {name: "killed, since it did not stop in time" if left[name] else "stopped" for name in before}
    pids = {name: ", ".join(str(one.pid) for one in found) for name, found in before.items()}
    return [f"{name}: {said[name]} (pid {pids[name]})" if pids[name] else f"{name}: was not running" for name in before]


def _send(processes: Collection[ProcessId], number: signal.Signals) -> None:
    """Signal exactly these processes; gone is fine."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            if process.is_alive():
                os.kill(process.pid, number)


def _wait_gone(processes: Collection[ProcessId], timeout_s: float) -> list[int]:
    """Wait until none of them lives. Returns the pids of those that still do when the time is over."""
    end = time.monotonic() + timeout_s
    while (left := [one.pid for one in processes if _lingers(one)]) and time.monotonic() < end:
        time.sleep(0.05)
    return left


def _lingers(process: ProcessId) -> bool:
    """Whether a process lives, or is a zombie whose other threads still are on their way out and hold its port."""
    with contextlib.suppress(psutil.Error):
        found = psutil.Process(process.pid)
        return process.is_alive() or (found.status() == psutil.STATUS_ZOMBIE and found.num_threads() > 1)
    return False
