"""How long the virtual clock waits for a client that may still have to react, so that its own time costs none. Pure.

A client keeps a number of requests in flight. When one is answered, the clock stands until another has come in its
place; a client that does not send another is given up after a grace, which gets shorter each time.
"""

from dataclasses import dataclass

GRACE_S, LEAST_GRACE_S, GRACE_FALL = 0.2, 0.001, 0.8
"""The longest wait for a request in the place of one that was answered, and what a wait in vain makes of it."""
QUIET_S = 0.05
"""A client that is starting has sent all that it will when nothing has come for so long."""
AWAY_S = 10.0
"""How long the clock waits for a server that crashed or was stopped to be started again, and then to be fed again."""


@dataclass(slots=True)
class Grace:
    """What is left of the patience with a client, in real seconds."""

    left_s: float = GRACE_S


class Pace:
    """One server's client. Times are real seconds of a clock that only goes forward.

    Attributes:
        in_flight: requests that the server has not answered.
        target: how many of them the client seems to keep.
        most: in flight at once, of a client that had more than probes; else 0.

    """

    def __init__(self, common: Grace) -> None:
        """Args: common, of all servers together, so that the end of a run does not cost the waits of each."""
        self.in_flight = self.target = self.most = 0
        self._graces, self._moved_s, self._fed_by_s = (Grace(), common), 0.0, 0.0

    @property
    def is_settled(self) -> bool:
        """Whether there is nothing to wait for."""
        return self.in_flight == self.target

    def arrived(self, now_s: float) -> None:
        """A request came; after the grace too, it shows that the client goes on."""
        self.in_flight, self._moved_s = self.in_flight + 1, now_s
        for grace in self._graces:
            grace.left_s = GRACE_S

    def left(self, now_s: float) -> None:
        """A request was answered, or its client hung up."""
        self.in_flight, self._moved_s = self.in_flight - 1, now_s

    def feeds(self) -> None:
        """What arrived is work, and no probe."""
        self.most, self._fed_by_s = max(self.most, self.in_flight), 0.0

    def returns(self, most: int, now_s: float) -> None:
        """The server serves again. A client that kept `most` requests at it is waited for, unless it is back already.

        Meanwhile time passes only for its probes, which come before the work.
        """
        if most and not self.most:
            self.target, self._fed_by_s = most, now_s + AWAY_S

    def waits_until_s(self, now_s: float, *, has_queue: bool) -> float | None:
        """The time until which the clock stands, unless something comes or goes before; None: it may move.

        Args: has_queue, requests wait in the server, so that another one changes nothing yet.
        """
        if now_s < self._fed_by_s:
            until_s = self._moved_s + QUIET_S if self.in_flight else self._fed_by_s
            return until_s if now_s < until_s else None
        if self.in_flight > self.target:
            until_s = self._moved_s + QUIET_S
        elif self.in_flight < self.target and not has_queue:
            until_s = self._moved_s + min(grace.left_s for grace in self._graces)
        else:
            return None
        if now_s < until_s:
            return until_s
        for grace in self._graces if self.in_flight < self.target else ():
            grace.left_s = max(LEAST_GRACE_S, grace.left_s * GRACE_FALL)
        self.target = self.in_flight
        return None
