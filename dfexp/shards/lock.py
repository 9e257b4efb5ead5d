"""One writer a folder: an flock that the kernel frees when its holder dies, and a note that says who holds it."""

from __future__ import annotations

import fcntl
import os
import socket
import time
from pathlib import Path

import psutil

from dfexp.errors import LockedError, StorageError
from dfexp.jsonl import decode_line, encode_line


class WriterLock:
    """Held from construction to `close`. Raises LockedError, naming the holder, if another process has it."""

    def __init__(self, path: Path) -> None:
        self._fd = -1
        try:
            # The file stays for ever: removing it would let two writers lock two files of one name.
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise LockedError(
                    f"{path.parent} is being written by {_holder(self._fd)}. Stop it, or wait until it ends."
                ) from None
            self._sign()
        except OSError as error:
            self.close()
            raise StorageError(f"cannot lock {path}: {error.strerror or error}. Fix the folder.") from error
        except BaseException:
            self.close()
            raise

    def _sign(self) -> None:
        note = encode_line(
            {
                "pid": os.getpid(),
                "host": socket.gethostname(),
                "process_started": psutil.Process().create_time(),
                "since": time.time(),
            }
        )
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, note, 0)

    def close(self) -> None:
        """Let the next writer in. Closing twice is harmless."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _holder(fd: int) -> str:
    """Whom the note names; it may be half written at this instant."""
    try:
        note = decode_line(os.pread(fd, 4096, 0))
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(note["since"]))
        return f"process {note['pid']} on {note['host']}, since {since}"
    except (ValueError, KeyError, TypeError, OSError):
        return "another process"
