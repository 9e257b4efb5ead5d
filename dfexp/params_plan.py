"""The `plan` group of a parameter file: what the capacity model needs to know of a run on SGLang."""

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Tokens = Annotated[float, Field(gt=0, le=10_000_000)]
Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0)]
Amount = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
FlagValues = dict[str, bool | int | float | str | list[str | int | float]]


class Group(BaseModel):
    """A part of a parameter file: unknown keys and wrong types are errors, values never change after reading."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class EarlyPart(Group):
    """What a client's counters showed early, over all servers together."""

    completions: Count = Field(description="completions so far")
    mean_tokens: Tokens = Field(description="their mean length")
    after_s: Positive = Field(description="seconds since the start")
    in_flight: Count = Field(description="requests in flight, all servers together")
    tok_per_s: Positive = Field(description="decode rate of all servers together")


class LengthPart(Group):
    """Token counts: all alike (tokens), log-normal (median with p95 or sigma), or fitted on a young run (early)."""

    tokens: Tokens | None = Field(None, description="every request has this many")
    median: Tokens | None = Field(None, description="of log-normal lengths")
    p95: Tokens | None = Field(None, description="their 95th percentile")
    sigma: Annotated[float, Field(ge=0, le=5)] | None = Field(None, description="or their spread")
    early: EarlyPart | None = Field(None, description="completions only: figures of a run's first minutes")

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        given = self.model_dump(exclude_none=True).keys()
        if given not in ({"tokens"}, {"median", "p95"}, {"median", "sigma"}, {"early"}):
            raise ValueError("give tokens, or median with p95 or sigma, or early: exactly one of the three")
        if self.p95 is not None and self.median is not None and self.p95 < self.median:
            raise ValueError(f"the 95th percentile {self.p95} is below the median {self.median}")
        return self


class SamplePart(Group):
    """A steady state that a server was seen in; the efficiency is fitted on it."""

    running: Positive = Field(description="requests running on one server")
    tok_per_s: Positive = Field(description="decode tok/s of that server (gen_throughput)")
    context: Tokens | None = Field(None, description="mean tokens per running request; default: the workload's")


class VariantPart(Group):
    """One set of flags to show beside the others."""

    flags: FlagValues = Field(description="SGLang flags, _ for -")
    concurrency: Count | None = Field(None, description="requests that the client keeps at each server")
    measured_tok_per_s: Positive | None = Field(None, description="decode tok/s per server that was seen")


class PlanGroup(Group):
    """What the capacity model needs to know of a run on SGLang."""

    model: str | None = Field(None, description="folder, config.json, or a shipped name; default: fleet.model")
    weights_gib: Positive | None = Field(None, description="all weights of one copy, where known better")
    weight_dtype: Literal["bfloat16", "fp8"] | None = Field(None, description="default: the checkpoint's")
    gpu: str = Field(description="kind of GPU, such as rtx-pro-6000")
    servers: Count | None = Field(None, description="each has flags.tp_size GPUs; default: fleet.servers, or 1")
    sglang_version: str = Field("0.5.12", description="version that will run; sizing rules and flag names follow it")
    free_gib: Positive | None = Field(None, description="measured memory free before loading, per GPU")
    free_after_load_gib: Positive | None = Field(None, description="the same after loading the weights")
    available_gpu_mem_gib: Amount | None = Field(None, description="measured by a server; allows a higher fraction")
    flags: FlagValues | None = Field(None, description="the flags as they are, _ for -; default: fleet.flags")
    concurrency: Count | None = Field(None, description="requests that the client keeps at each server today")
    prompts: Count | None = Field(None, description="completions to make; default: as many as there are prompts")
    prompt: LengthPart = Field(description="prompt tokens")
    completion: LengthPart = Field(description="completion tokens")
    max_tokens: Literal["fit"] | Count = Field("fit", description="as sent with each request")
    shared_prefix_share: Share | None = Field(None, description="part of prompt text seen before; default: measured")
    samples: list[SamplePart] = Field(default_factory=list, description="steady states to fit the efficiency on")
    variants: dict[str, VariantPart] = Field(default_factory=dict, description="flag sets to show beside each other")
