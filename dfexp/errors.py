"""The exception tree. Each class says when it is raised; every message says what happened, the value and the fix.

Code that decides what to do next reads an attribute (`retryable`, `counts_as_attempt`, `stops_run`), never a message.
"""

from typing import ClassVar


class DfexpError(Exception):
    """Root of everything dfexp raises on purpose.

    Class attribute: `exit_status`, of a command that it ends: 1 failed, and may succeed later; 2 what was put in is
    wrong, so that the same command fails again; 3 stopped.
    """

    exit_status: ClassVar[int] = 1

    def _render_traceback_(self) -> list[str]:
        """Show the message alone in a notebook: the frames of a library say nothing to its user."""
        return [f"{type(self).__name__}: {self}"]


class ParamsError(DfexpError):
    """A parameter file, an override or a notebook parameter is wrong. Nothing has been started."""

    exit_status = 2


class PromptsError(DfexpError):
    """A source of prompts cannot be read, or holds no usable prompt."""

    exit_status = 2


class ControlError(DfexpError):
    """A command could not be handed to a running process, or it did not answer in time."""


class ShardError(DfexpError):
    """Something is wrong with the files of a run. Nothing has been changed on disk."""


class LockedError(ShardError):
    """Another living process holds the folder or the fleet; the message names it."""


class FingerprintError(ShardError):
    """The folder belongs to other prompts, another model or other sampling; the message names what differs."""

    exit_status = 2


class CorruptShardError(ShardError):
    """A file holds what no interrupted write explains: a torn middle line, an index twice, a changed shard."""


class StorageError(ShardError):
    """The disk refused a write (full, read-only, gone). Rows handed over are still in memory and may be tried again."""


class StoreError(DfexpError):
    """S3 refuses what the parameters ask for: credentials, bucket, permission, no conditional writes.

    Class attribute: `retryable`, the same call may succeed later, with nothing changed here.
    """

    retryable: ClassVar[bool] = False


class StoreUnavailable(StoreError):
    """S3 did not answer, broke off or asked to come back later."""

    retryable = True


class StoreConflict(StoreError):
    """An object has the key of one of ours and other content. It was left as it is."""


class StoreTaken(StoreError):
    """Another process writes to the prefix, or another machine has gone on with the run; the message names it."""


class FleetError(DfexpError):
    """A fleet cannot be launched, found, attached or stopped."""


class EngineStartError(FleetError):
    """A server ended or stayed silent before it answered its first request; the message has the cause from its log."""


class EngineMissing(EngineStartError):
    """What the engine needs is not there: a package that is not installed, a key that is not set."""

    exit_status = 2


class RunError(DfexpError):
    """A generation run cannot start or go on."""


class RunStopped(RunError):
    """A run was asked to stop before its last row. Rows reported done are on disk; the message says how to resume."""

    exit_status = 3


class ExportError(DfexpError):
    """A training set cannot be written as it was asked for. No file was left behind, and none was changed."""


class NotebookError(DfexpError):
    """A notebook failed while it was run unattended; the message names the notebook, the cell and the cause."""


class NotebookInputError(NotebookError):
    """The same, where the cause is what was put in: the parameters, the prompts, or a run of other ones."""

    exit_status = 2


class RequestError(DfexpError):
    """One request did not give a completion.

    Class attributes: `kind`, a short stable name for failures.jsonl and counts; `retryable`, the same row may succeed
    when it is sent again; `counts_as_attempt`, the failure may be the row's own fault and uses up one of its attempts;
    `stops_run`, every other row may fail in the same way.
    """

    kind: ClassVar[str] = "error"
    retryable: ClassVar[bool] = False
    counts_as_attempt: ClassVar[bool] = True
    stops_run: ClassVar[bool] = False

    def __init__(self, message: str, *, status: int | None = None, retry_after_s: float | None = None) -> None:
        """Args: message, the server's words where there are any; status, of HTTP; retry_after_s, seconds to wait."""
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s


class Unreachable(RequestError):
    """No connection could be made (refused, no route, name not found): the request never reached a server."""

    kind, retryable, counts_as_attempt = "unreachable", True, False


class ConnectionLost(RequestError):
    """The connection broke after the request was sent and before the whole answer came."""

    kind, retryable = "connection_lost", True


class TimedOut(RequestError):
    """No whole answer within the time that the longest allowed answer can take, or HTTP 408."""

    kind, retryable = "timeout", True


class RateLimited(RequestError):
    """HTTP 429, or 503 with Retry-After: the server asks to wait."""

    kind, retryable, counts_as_attempt = "rate_limited", True, False


class ServerFault(RequestError):
    """HTTP 5xx."""

    kind, retryable = "server_error", True


class BadAnswer(RequestError):
    """HTTP 200 whose body is not what was asked for (HTML of a proxy, truncated JSON, wrong types), or a redirect."""

    kind, retryable = "bad_answer", True


class PromptTooLong(RequestError):
    """The prompt alone fills the context, so no answer fits."""

    kind = "prompt_too_long"


class Refused(RequestError):
    """HTTP 4xx: the server will not take this request, now or later."""

    kind = "refused"


class AccessDenied(RequestError):
    """HTTP 401, 403 or 404: key, route or model name is wrong for every row alike, or a gateway bars the one row."""

    kind, stops_run = "access_denied", True


_KNOWN: dict[int, type[RequestError]] = {408: TimedOut, 429: RateLimited}
_KNOWN |= dict.fromkeys((401, 403, 404), AccessDenied)


def of_status(status: int, message: str, retry_after_s: float | None = None) -> RequestError:
    """The error that an HTTP status other than 2xx stands for."""
    other = ServerFault if status >= 500 else Refused if status >= 400 else BadAnswer
    kind = RateLimited if status == 503 and retry_after_s is not None else _KNOWN.get(status, other)
    return kind(message, status=status, retry_after_s=retry_after_s)
