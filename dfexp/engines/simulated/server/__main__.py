"""The host process of all simulated servers in its working folder: `python -m dfexp.engines.simulated.server FD`.

FD is the listening socket at which the servers' own processes come in. It ends with the last of them.
"""

import asyncio
import fcntl
import json
import os
import socket
import sys
import traceback
from contextlib import suppress
from pathlib import Path

from dfexp.engines.simulated.server.attach import LOCK, SOCKET
from dfexp.engines.simulated.server.host import Host
from dfexp.engines.simulated.server.spec import read_spec
from dfexp.errors import DfexpError

LONELY_S = 10.0
"""The first process comes at once; without any for so long, something went wrong with it."""


async def serve(door: socket.socket, folder: Path) -> None:
    """Host servers until the last one has gone. Raises what stopped the clock."""
    loop, links = asyncio.get_running_loop(), set[asyncio.Task[None]]()
    door.setblocking(False)
    async with Host(folder=folder) as host:
        coming = asyncio.create_task(loop.sock_accept(door))
        while True:
            waits = {coming, host.driver, *links}
            await asyncio.wait(waits, timeout=None if links else LONELY_S, return_when=asyncio.FIRST_COMPLETED)
            for ended in filter(asyncio.Task.done, (host.driver, *links)):
                ended.result()
            links = {link for link in links if not link.done()}
            if coming.done():
                links.add(asyncio.create_task(_stand_for(host, coming.result()[0], folder)))
                coming = asyncio.create_task(loop.sock_accept(door))
            if not links and _may_end():
                coming.cancel()
                return


def _may_end() -> bool:
    """Whether no process is on its way in; from then on the next one starts a host of its own."""
    lock = os.open(LOCK, os.O_RDWR | os.O_CREAT)  # stays open until this process has ended
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        return False
    os.unlink(SOCKET)
    return True


async def _stand_for(host: Host, link: socket.socket, folder: Path) -> None:
    """Take in one server's process, and keep its server for as long as that lives."""
    argv, log, port = await asyncio.to_thread(_hello, link)

    def tell(status: int) -> None:
        with suppress(OSError):  # it has gone
            link.sendall(f"exit {status}\n".encode())

    with link, os.fdopen(log, "w") as file, socket.socket(fileno=port) as sock:
        link.sendall(b"ok\n")
        link.setblocking(False)
        try:
            spec = read_spec(argv, folder)
        except (DfexpError, OSError, ValueError, KeyError) as error:
            traceback.print_exception(error, file=file)
            tell(1)
            return
        host.clock.go_at(spec.speed)
        server = host.open(spec, sock, log, tell)
        async with asyncio.TaskGroup() as group:
            group.create_task(server.start())
            with suppress(ConnectionError):
                await asyncio.get_running_loop().sock_recv(link, 1)  # returns when it has gone
            host.remove(server)


def _hello(link: socket.socket) -> tuple[list[str], int, int]:
    """What a process sends when it comes: its arguments, its output, and the socket that is bound to its port."""
    link.setblocking(True)
    said, descriptors, _, _ = socket.recv_fds(link, 2**20, 2)
    while not said.endswith(b"\n"):
        said += link.recv(2**20)
    log, port = descriptors
    return json.loads(said), log, port


if __name__ == "__main__":
    asyncio.run(serve(socket.socket(fileno=int(sys.argv[1])), Path.cwd()))
