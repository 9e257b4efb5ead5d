"""How many requests a server should have in flight when it does not say: found by its rate. Pure: times are passed in.

Half as many again are tried as long as the server makes clearly more tokens a second for it. A larger number costs only
waiting, a smaller one throughput, so a gain of a tenth is enough to go on; a step without it is measured twice.
"""

from dataclasses import dataclass

FIRST, MOST = 16, 1024
AGAIN_S = 7200.0
"""A number that was found is looked for again, from one step below it, after so long."""
_STEP, _GAIN, _LOOKS, _LEAST_ANSWERS, _TURNS = 1.5, 1.1, 2, 32, 4  # answers in a window: so many for each in flight


@dataclass(slots=True)
class Probe:
    """A climb that ends: `value` requests in flight, the number to use until the next look."""

    value: int = FIRST
    is_settled: bool = False
    _before: tuple[int, float] | None = None  # the step below, and its rate
    _looks: int = 0  # at this step, that showed no gain
    _skip: int = FIRST  # answers to requests that were sent before this step
    _answers: int = 0
    _tokens: int = 0
    _since: float = 0.0
    _settled_at: float = 0.0
    _is_told: bool = False
    _least: int = FIRST // 2  # refusals do not take it lower before the next look

    def answered(self, now: float, tokens: int) -> bool:
        """Count an answer of a server that is kept full. True when a number has just been found.

        Args: now, monotonic seconds.
        """
        if self.is_settled:
            is_news, self._is_told = not self._is_told, True
            if now - self._settled_at > AGAIN_S:
                self.again()
            return is_news
        if self._skip > 0:
            self._skip, self._since = self._skip - 1, now
            return False
        self._answers, self._tokens = self._answers + 1, self._tokens + tokens
        if self._answers < max(_LEAST_ANSWERS, _TURNS * self.value):
            return False
        return self._judge(now, self._tokens / max(now - self._since, 1e-9))

    def refused(self, now: float, in_flight: int) -> None:
        """The server turned one away while it had so many, that one included: there is room for one fewer."""
        if in_flight <= self.value:
            self.value = max(self._least, in_flight - 1)
            self._settle(now)

    def disturbed(self) -> None:
        """The server was not kept full: the window begins anew."""
        self._answers = self._tokens = 0
        self._skip = max(self._skip, 1)

    def again(self) -> None:
        """The server may be another one now: look again, from one step below."""
        self.is_settled, self._before = False, None
        self._go(self.value if self.value == FIRST else max(1, round(self.value / _STEP)))

    def _judge(self, now: float, rate: float) -> bool:
        """A window is over: go on, look once more, or go back and hold."""
        if self._before is None or rate >= _GAIN * self._before[1]:
            if self.value < MOST:
                self._before = self.value, rate
                self._go(min(MOST, max(self.value + 1, round(self.value * _STEP))))
                return False
        else:
            self._looks += 1
            if self._looks < _LOOKS:
                self.disturbed()
                return False
            self.value = self._before[0]
        self._settle(now)
        return self.answered(now, 0)

    def _go(self, value: int) -> None:
        self.value, self._looks, self._skip, self._least = value, 0, value, max(1, value // 2)
        self._answers, self._tokens, self._is_told = 0, 0, False

    def _settle(self, now: float) -> None:
        self.is_settled, self._settled_at = True, now
