"""The `prompts` group of a parameter file: sources, what a record means, what is left out."""

from typing import Annotated, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from dfexp.params_plan import Count, Group, Positive, Share

Text = Annotated[str, StringConstraints(min_length=1)]
Language = Annotated[str, StringConstraints(pattern=r"^[a-z]{2,3}$")]
Role = Literal["system", "developer", "user", "assistant", "tool"]


class HubPart(Group):
    """A data set by its name, loaded by the package `datasets`."""

    name: Text = Field(description="its name on the Hugging Face hub, or a folder of files that `datasets` can load")
    config: Text | None = Field(None, description="its configuration, where it has several")
    split: Text = Field("train", description="its split")
    revision: Text | None = Field(None, description="commit, tag or branch; only a commit stays the same")


class PromptsPart(Group):
    """One source of prompts, and what its records mean."""

    path: str | Annotated[list[str], Field(min_length=1)] | None = Field(
        None, description="JSONL, Parquet or text files, by suffix"
    )
    hf: HubPart | None = Field(None, description="or a data set by its name")
    column: str | None = Field(None, description="field with the text or the messages; default: found by its name")
    id_column: str | None = Field(None, description="field with an id; default: `id` where there is one")
    system: str | None = Field(None, description="system message put before prompts that have none")
    system_column: Text | None = Field(None, description="field with such a message, which beats `system`")
    role_key: Text | None = Field(None, description="of a message, who speaks; default: role or from")
    content_key: Text | None = Field(None, description="of a message, its text; default: content or value")
    roles: dict[str, Role] | None = Field(None, description="other names of roles, such as {bot: assistant}")
    turns: Literal["last", "first", "each"] | None = Field(
        None, description="which turns of a chat are answered anew: last (the default), first, or each as a prompt"
    )
    draw: Literal["first", "random"] | None = Field(
        None, description="which rows, where not all: default first, of several `sources` random"
    )

    @property
    def files(self) -> list[str]:
        """Its files, as given; none of a data set."""
        return [self.path] if isinstance(self.path, str) else list(self.path or ())


class SourcePart(PromptsPart):
    """One source of a mixture. What it leaves open is as the group `prompts` has it; without weight or count: all."""

    weight: Positive | None = Field(None, description="its part of all rows, against the weights of other sources")
    count: Count | None = Field(None, description="or how many rows")

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.path is None) == (self.hf is None):
            raise ValueError("give path or hf: exactly one of the two")
        if self.weight is not None and self.count is not None:
            raise ValueError("give weight or count, not both")
        return self


class FiltersPart(Group):
    """Prompts that are left out; lengths are of all messages together, without the template."""

    min_chars: Count | None = Field(None, description="least characters")
    max_chars: Count | None = Field(None, description="most characters")
    min_tokens: Count | None = Field(None, description="least tokens; needs `tokenizer`")
    max_tokens: Count | None = Field(None, description="most tokens; needs `tokenizer`")
    tokenizer: Text | None = Field(None, description="path of a tokenizer.json, such as the model's own")
    languages: list[Language] = Field(
        default_factory=list, description="only these, such as [en, de]: two letters each"
    )

    @model_validator(mode="after")
    def _tokens_need_a_tokenizer(self) -> Self:
        if (self.tokenizer is None) != (self.min_tokens is None and self.max_tokens is None):
            raise ValueError("min_tokens or max_tokens, and tokenizer: each needs the other")
        return self


class DuplicatesPart(Group):
    """Repeated prompts. They are legal, since a row is known by its index: kept and counted, unless told otherwise."""

    exact: bool = Field(False, description="leave out a prompt that repeats an earlier one, message by message")
    near: Share | None = Field(None, description="leave out what is so similar to an earlier one, 0-1, such as 0.8")
    not_in: str | list[str] = Field(default_factory=list, description="leave out what is in these files or runs")


class PromptsGroup(PromptsPart):
    """Where the prompts come from."""

    sources: list[SourcePart] = Field(default_factory=list, description="or several sources, mixed")
    limit: int | None = Field(None, ge=1, description="take only so many")
    seed: int = Field(0, ge=0, description="of the draw and of the order of a mixture")
    on_bad: Literal["skip", "fail"] = Field("skip", description="a record that is no prompt: count it, or refuse all")
    filters: FiltersPart = Field(FiltersPart(), description="which prompts are left out")
    duplicates: DuplicatesPart = Field(DuplicatesPart(), description="what becomes of repeated prompts")

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if (self.path is not None) + (self.hf is not None) + bool(self.sources) != 1:
            raise ValueError("give path, hf or sources: exactly one of the three")
        return self

    @property
    def parts(self) -> list[PromptsPart]:
        """The sources; of the short form the group itself."""
        return [*self.sources] or [self]

    @property
    def paths(self) -> list[str]:
        """All files, as given."""
        return [each for part in self.parts for each in part.files]
