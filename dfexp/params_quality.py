"""The `quality` group of a parameter file: which answers a training set takes."""

from pydantic import Field
from pydantic.functional_validators import field_validator

from dfexp.params_plan import Group, Share
from dfexp.quality import ALWAYS, KNOWN, MARKS, REPETITIVE, Thresholds


class QualityGroup(Group):
    """What `dfexp export` leaves out, and 04_report counts; options of `dfexp export` win."""

    accept: list[str] = Field(default_factory=list, description="marks of answers that are rejected else, now taken")
    reject: list[str] = Field(default_factory=list, description="marks that are taken else, now rejected; it wins")
    min_tokens: int = Field(0, ge=0, description="fewest tokens of an answer")
    max_tokens: int | None = Field(None, ge=1, description="most tokens of an answer; default: any number")
    max_repeated: Share = Field(REPETITIVE, description="most of an answer that may be said five times or more")
    outlier_sigmas: float = Field(4.0, gt=0, le=100, description="robust deviations of log lengths: length_outlier")

    @field_validator("accept", "reject")
    @classmethod
    def _are_marks(cls, given: list[str]) -> list[str]:
        can = [mark for mark in KNOWN if mark not in ALWAYS]
        if wrong := [mark for mark in given if mark not in can]:
            raise ValueError(f"{wrong[0]!r} can be neither accepted nor rejected. What can: {', '.join(can)}.")
        return given

    @property
    def thresholds(self) -> Thresholds:
        """What the group comes to."""
        return Thresholds(
            rejected=frozenset({*MARKS} - {*self.accept} | {*self.reject}), tokens=(self.min_tokens, self.max_tokens),
            repeated=self.max_repeated, sigmas=self.outlier_sigmas,
        )  # fmt: skip
