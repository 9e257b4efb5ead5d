"""The `quality` group of a parameter file: which answers a training set takes."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field
from pydantic.functional_validators import field_validator, model_validator

from dfexp.params_plan import Group
from dfexp.quality import ALWAYS, KNOWN, MARKS, Thresholds

Tokens = Annotated[int, Field(ge=0)]


class QualityGroup(Group):
    """What `dfexp export` leaves out, and 04_report counts; options of `dfexp export` win."""

    accept: list[str] = Field(default_factory=list, description="marks of answers that are rejected else, now taken")
    reject: list[str] = Field(default_factory=list, description="marks of answers that are taken else, now rejected")
    min_tokens: Tokens = Field(0, description="fewest tokens of an answer")
    max_tokens: Tokens | None = Field(None, description="most tokens of an answer; default: any number")
    max_repeated: float | None = Field(
        None, ge=0, lt=1, description="most of an answer that may be said five times; default: `repetitive` says enough"
    )
    outlier_sigmas: float = Field(4.0, gt=0, le=100, description="robust deviations of log lengths: length_outlier")

    @field_validator("accept", "reject")
    @classmethod
    def _are_marks(cls, given: list[str]) -> list[str]:
        can = [mark for mark in KNOWN if mark not in ALWAYS]
        if wrong := [mark for mark in given if mark not in can]:
            raise ValueError(f"{wrong[0]!r} can be neither accepted nor rejected. What can: {', '.join(can)}.")
        return given

    @model_validator(mode="after")
    def _says_one_thing(self) -> Self:
        if both := sorted({*self.accept} & {*self.reject}):
            raise ValueError(f"{both[0]!r} is both accepted and rejected. Say one.")
        if self.max_tokens is not None and self.max_tokens < self.min_tokens:
            raise ValueError(f"min_tokens = {self.min_tokens} is above max_tokens = {self.max_tokens}. Swap them.")
        return self

    @property
    def thresholds(self) -> Thresholds:
        """What the group comes to."""
        return Thresholds(
            rejected=frozenset({*MARKS} - {*self.accept} | {*self.reject}), tokens=(self.min_tokens, self.max_tokens),
            repeated=self.max_repeated, sigmas=self.outlier_sigmas,
        )  # fmt: skip
