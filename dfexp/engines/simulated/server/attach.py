"""The process of one simulated server: `python -S -P attach.py FLAGS...`, with the fleet's folder as working folder.

It binds the server's port and hands that, its output and its arguments over to the host process of all simulated
servers in this folder, which it starts if there is none. Then it stands for its server: what ends one ends the other.
The standard library alone, so that it starts at once and stays small.
"""

import fcntl
import json
import os
import socket
import subprocess
import sys

SOCKET, LOCK, LOG = "server-simulator.sock", "server-simulator.lock", os.path.join("logs", "simulator.log")
"""Relative to the fleet's folder: the path of a socket may have about 100 bytes."""


def main(argv: list[str]) -> int:
    """Be this server until it ends; its exit status. 1 also where the host is gone."""
    host, port = argv[argv.index("--host") + 1], int(argv[argv.index("--port") + 1])
    try:
        server = bound(host, port)
    except OSError as error:
        print(f"ERROR:    {taken(host, port, error)}", flush=True)
        return 1
    with open(LOCK, "a") as lock:
        # Held until the host has answered: a host that is about to end asks for this lock first.
        fcntl.flock(lock, fcntl.LOCK_EX)
        link = connected()
        hello = json.dumps(argv).encode() + b"\n"
        sent = socket.send_fds(link, [hello], [sys.stdout.fileno(), server.fileno()])
        link.sendall(hello[sent:])
        said = link.makefile("r")
        said.readline()
    _, _, status = said.readline().partition("exit ")
    return int(status or 1)


def bound(host: str, port: int) -> socket.socket:
    """A socket at this address that does not listen yet. Raises OSError."""
    server = socket.socket()
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # earlier connections may linger
    server.bind((host, port))
    return server


def taken(host: str, port: int, error: OSError) -> str:
    """SGLang's words for a port that cannot be had."""
    return f"[Errno {error.errno}] error while attempting to bind on address ({host!r}, {port}): {error.strerror}"


def connected() -> socket.socket:
    """A connection to the host of this folder, which is started if there is none."""
    link = socket.socket(socket.AF_UNIX)
    try:
        link.connect(SOCKET)
    except OSError:
        with socket.socket(socket.AF_UNIX) as door, open(LOG, "ab") as log:
            if os.path.exists(SOCKET):
                os.unlink(SOCKET)
            door.bind(SOCKET)
            door.listen(128)
            # A variable that begins so marks what carries it as one server's own.
            env = {name: value for name, value in os.environ.items() if not name.startswith("DFEXP_")}
            command = [sys.executable, "-P", "-m", "dfexp.engines.simulated.server", str(door.fileno())]
            subprocess.Popen(
                command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                pass_fds=[door.fileno()],
            )  # fmt: skip
        link.connect(SOCKET)
    return link


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
