"""Ports for new servers, and who answers at one."""

from __future__ import annotations

import errno
import random
import socket

_RANGE = range(20000, 32000)
"""Below every system's range of ephemeral ports: a client's outgoing connection can then never sit on the port of a
server that is down, nor connect to itself while it tries to reach one."""


def free_ports(host: str, count: int) -> list[int]:
    """So many different TCP ports that nobody listens on at `host` now. Raises OSError if the host is not ours.

    Nothing keeps them free: a server that loses the race ends with "address in use" and is planned again.
    """
    candidates = list(_RANGE)
    random.SystemRandom().shuffle(candidates)
    found: list[int] = []
    for port in candidates:
        if len(found) == count:
            break
        if _is_free(host, port):
            found.append(port)
    if len(found) < count:
        raise OSError(f"only {len(found)} of {count} ports between {_RANGE.start} and {_RANGE.stop} are free")
    return found


def is_listening(host: str, port: int, timeout_s: float = 2.0) -> bool:
    """Whether anybody accepts connections at this address."""
    try:
        with socket.create_connection((host, port), timeout=timeout_s):
            return True
    except OSError:
        return False


def client_host(host: str) -> str:
    """The address at which a server that listens on `host` is reached from this machine."""
    return {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 (compared, not bound)


def url_of(host: str, port: int) -> str:
    """The base URL of a server that listens on `host`; IPv6 addresses get their brackets."""
    name = client_host(host)
    return f"http://[{name}]:{port}" if ":" in name else f"http://{name}:{port}"


def _is_free(host: str, port: int) -> bool:
    """Whether the port can be bound. Raises OSError for any reason other than that it is taken."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                return False
            raise
    return True
