"""The faults of simulated servers in a parameter file: what goes wrong, when, and for which requests."""

from typing import Annotated, Literal, Self, get_args

from pydantic import Field, model_validator

from dfexp.params_plan import Amount, Count, Group

Share = Annotated[float, Field(gt=0, le=1)]
Speed = Literal["max"] | Annotated[float, Field(gt=0)]
"""Virtual seconds per real second, or as fast as the client can go."""
Kind = Literal["crash", "hang", "slow", "health", "oom_at_start", "status", "html", "garbage", "cut", "never"]
"""A server ends; stands still; takes `factor` times as long; answers /health with `status`; ends while it loads. A
request gets an HTTP error; a page of a proxy; one token over and over; a part of an answer; no answer.
"""
_WINDOW, _CHOICE = ("at_s", "for_s"), ("share", "contains", "times")
_MEANING: dict[str, tuple[str, ...]] = dict.fromkeys(get_args(Kind), (*_WINDOW, *_CHOICE)) | {
    "hang": _WINDOW, "slow": (*_WINDOW, "factor"), "health": (*_WINDOW, "status"), "oom_at_start": ("times",),
    "status": (*_WINDOW, *_CHOICE, "status", "retry_after_s"),
}  # fmt: skip


class FaultPart(Group):
    """One thing that goes wrong. Times are virtual seconds since all servers served for the first time."""

    kind: Kind = Field(description="what happens: to the server, or, from status to never, to requests that arrive")
    server: int | None = Field(None, ge=0, description="index of the server, from 0; default: every one")
    at_s: Amount | None = Field(None, description="when it begins; default: as soon as all servers serve")
    for_s: Annotated[float, Field(gt=0)] | None = Field(None, description="how long it lasts; default: for ever")
    factor: float = Field(5.0, gt=0, le=10_000, description="slow: factor on all times")
    status: int | None = Field(None, ge=200, le=599, description="HTTP status; default: 500, of health 503")
    retry_after_s: Amount | None = Field(None, description="status: the Retry-After that it comes with")
    share: Share | None = Field(None, description="part of the requests, the same ones at every try; default: all")
    contains: Annotated[str, Field(min_length=1)] | None = Field(None, description="only requests with this text")
    times: Count | None = Field(None, description="most for each server; default: no limit, of oom_at_start 1")

    @model_validator(mode="after")
    def _means_something(self) -> Self:
        what: str = self.kind
        known, fields = _MEANING[self.kind], type(self).model_fields
        given = {name for name, field in fields.items() if getattr(self, name) != field.default} - {"kind", "server"}
        if self.kind == "crash" and not self.is_to_requests:
            if self.at_s is None:
                raise ValueError("a crash needs at_s, or share or contains for the requests that cause it.")
            known, what = ("at_s",), "a crash at a time, which happens once"
        if odd := sorted(given.difference(known)):
            raise ValueError(f"{odd[0]} means nothing for {what}. It takes server, {', '.join(known)}.")
        if self.kind == "status" and self.status is not None and self.status < 400:
            raise ValueError(f"status {self.status} is no failure. Give 400 to 599.")
        return self

    @property
    def is_to_requests(self) -> bool:
        """Whether it happens to requests when they arrive; else to a whole server."""
        if self.kind == "crash":
            return self.share is not None or self.contains is not None
        return "share" in _MEANING[self.kind]

    @property
    def answered_status(self) -> int:
        """The HTTP status, the default in place."""
        return self.status or (503 if self.kind == "health" else 500)
