"""The faults of one simulated server: which are due when, which hit a request, and what it is answered. Pure.

Times are virtual seconds since all servers of the fleet served for the first time.
"""

from collections import Counter
from collections.abc import Sequence
from hashlib import blake2b
from math import inf

from dfexp.engines.simulated.server.pages import refused
from dfexp.params_simulated import FaultPart, Speed

GARBAGE = "!"
"""What SGLang says for token 0, over and over: one for each token."""


Reply = tuple[int, bytes, str, dict[str, str]]
"""An HTTP answer in place of a completion: status, body, content type, headers."""


class Faults:
    """Those of the parameter file's faults that concern server `index`.

    Attributes:
        met: how often crashes and faults of requests happened, by their numbers in the file. It may outlive a restart.

    """

    def __init__(self, parts: Sequence[FaultPart], index: int, seed: int, met: Counter[str] | None = None) -> None:
        mine = [(str(number), part) for number, part in enumerate(parts) if part.server in (None, index)]
        self._to_requests = [(number, part) for number, part in mine if part.is_to_requests]
        self._on_schedule = [(number, part) for number, part in mine if not part.is_to_requests]
        self._seed, self.met = seed, Counter[str]() if met is None else met

    def due(self, since_s: float = 0.0) -> list[tuple[str, FaultPart]]:
        """What is scheduled for a server that starts at `since_s`, with its number; what goes on by then is among it.

        A crash that was met is not: its server comes back in the moment of the crash, give or take a rounding.
        """
        found = []
        for number, part in self._on_schedule:
            at_s = part.at_s or 0.0
            is_over = at_s < since_s if part.kind == "crash" else at_s + (part.for_s or inf) <= since_s
            if part.kind != "oom_at_start" and not is_over and not self.met[number]:
                found.append((number, part))
        return found

    def fails_to_start(self, number: int) -> FaultPart | None:
        """The fault that ends start `number` of this server, counted from 1."""
        parts = (part for _, part in self._on_schedule if part.kind == "oom_at_start")
        return next((part for part in parts if number <= (part.times or 1)), None)

    def of_request(self, key: int, text: str, at_s: float) -> FaultPart | None:
        """The first fault that hits a request which arrives at `at_s`; it counts as met.

        Args: key, as `request_key` makes it: the same requests are hit whenever they come; text, all that it says.
        """
        for number, part in self._to_requests:
            begins_s = part.at_s or 0.0
            is_time = begins_s <= at_s < begins_s + (part.for_s or inf)
            digest = blake2b(f"{self._seed} {number} {key}".encode(), digest_size=7).digest()
            is_drawn = int.from_bytes(digest, "big") < (part.share or 1.0) * 2**56
            is_meant = is_drawn and (part.contains or "") in text
            if is_time and is_meant and self.met[number] < (part.times or inf):
                self.met[number] += 1
                return part
        return None


def reply(part: FaultPart, speed: Speed) -> Reply:
    """The answer of a `status` fault as SGLang words errors, of an `html` fault a proxy's page.

    Its Retry-After is in the client's seconds, which are real ones: 0 on a clock that goes as fast as the client can.
    """
    if part.kind == "html":
        page = "<html><head><title>502 Bad Gateway</title></head><body><h1>502 Bad Gateway</h1></body></html>\r\n"
        return 502, page.encode(), "text/html", {}
    status, body = refused(part.answered_status, "simulated fault")
    scale = 0.0 if speed == "max" else 1 / speed
    waits = {} if part.retry_after_s is None else {"Retry-After": f"{part.retry_after_s * scale:g}"}
    return status, body, "application/json", waits
