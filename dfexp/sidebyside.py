"""The same prompts through two configurations, each on one server of its own, one after the other.

`both_ways` is the one call; what it found is kept in outputs/equivalence/ for 02_capacity.
"""

import asyncio
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dfexp import prompts
from dfexp.client import ServerClient, answers
from dfexp.equivalence import LEAST_PAIRS, Said, Verdict, compare, first_difference
from dfexp.errors import FleetError, ParamsError
from dfexp.fleet import up
from dfexp.fleet.record import NOT_OF_SERVERS, flat
from dfexp.generate.identity import request_fields
from dfexp.jsonl import AppendLog, read_log
from dfexp.params import ExternalFleet, RunSpec, StoreGroup
from dfexp.records import Answer, Prompt
from dfexp.tables import Table, labelled

_SHOWN, _BEFORE, _AFTER = 3, 60, 200  # examples, and characters of each around the first difference
_UNKNOWN_ROOM, _TIMEOUT_S = 8, 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What is asked: so many prompts, drawn by `seed`, tokens of an answer at most, temperature (0: greedy)."""

    prompts: int = 64
    max_tokens: int = 512
    temperature: float = 0.0
    seed: int = 0


def both_ways(spec: RunSpec, changed: RunSpec, root: Path, tell: Callable[[str], None], terms: Terms) -> Verdict:
    """Whether the model says other things with `changed` than with `spec`.

    Two fleets of one server each are launched and stopped, `<fleet>-reference` and then `<fleet>-changed`, so the GPU
    must be free. The reference answers twice, since its own noise is the yardstick. Seeds are not sent: every answer is
    a draw of its own. Raises ParamsError where nothing differs, FleetError, EngineStartError, PromptsError.
    """
    changes = _changes(spec, changed)
    if not changes:
        raise ParamsError(
            "both configurations are the same on one server and at one temperature, which --temperature gives. Name "
            "what shall differ, with --with fleet.KEY=VALUE."
        )
    if terms.max_tokens < 1:
        raise ParamsError(f"--max-tokens {terms.max_tokens}: give 1 or more.")
    drawn = _draw(prompts.read(spec.prompts, root), terms)
    if len(drawn) < LEAST_PAIRS:
        raise ParamsError(f"{len(drawn)} prompts say too little. Give --prompts {LEAST_PAIRS} or more, and as many.")
    asked = f"{len(drawn)} prompts, answers of at most {terms.max_tokens} tokens"
    tell(f"{asked}: twice with the settings as they are, once with: {'; '.join(changes)}")
    reference, again = _served(spec, root, "reference", drawn, terms, 2, tell)
    (other,) = _served(changed, root, "changed", drawn, terms, 1, tell)
    verdict = compare(reference, other, again)
    found = {
        "at": time.time(), "changes": changes, **asdict(terms), "asked": len(drawn), "words": str(verdict),
        "engine": spec.fleet.engine, **asdict(verdict), "examples": _examples(reference, other),
    }  # fmt: skip
    path = _path(spec, root)
    path.parent.mkdir(parents=True, exist_ok=True)
    with AppendLog(path) as log:
        log.append([found])
    return verdict


def kept(spec: RunSpec, root: Path) -> list[dict[str, Any]]:
    """What was found so far for this run's file, oldest first."""
    path = _path(spec, root)
    return list(read_log(path)) if path.exists() else []


def conclusion(found: Sequence[Mapping[str, Any]]) -> str:
    """The last comparison in a sentence, as Markdown; without one what to do."""
    return f"**{'; '.join(found[-1]['changes'])}** {found[-1]['words']}" if found else "Nothing was compared so far."


def tables(found: Sequence[Mapping[str, Any]]) -> list[Table]:
    """The comparisons, and the tests and examples of the last."""
    if not found:
        return []
    note = (
        "Both configurations answered the same prompts. The reference was asked twice: what differs then is noise. "
        "p: how often chance alone shows as much where nothing has changed; below 0.01, shared by the tests, it counts."
    )
    rows = [
        {
            "change": "; ".join(one["changes"]), "verdict": one["verdict"], "prompts": one["pairs"],
            "temperature": one["temperature"], "identical": one["identical"],
            "identical without a change": one["own_identical"], "differ after, characters": one["first_difference"],
            "without a change, characters": one["own_first_difference"],
            "length, times": one["length_ratio"] and one["length_ratio"][0],
        }
        for one in found
    ]  # fmt: skip
    last = found[-1]
    title = labelled("Does a setting change what the model says?", last["engine"])
    tests = [{**{key: test[key] for key in ("name", "reference", "changed")}, "p": test["p"],
              "p, reference against itself": test["own_p"]} for test in last["tests"]]  # fmt: skip
    return [
        Table(name="equivalence", title=title, rows=rows, note=note),
        Table(name="equivalence_tests", title=f"Tests of: {'; '.join(last['changes'])}", rows=tests),
        Table(name="equivalence_examples", title="Where answers part", rows=last["examples"]),
    ]


def _path(spec: RunSpec, root: Path) -> Path:
    return root / spec.outputs / "equivalence" / f"{spec.run}.jsonl"


def _changes(spec: RunSpec, changed: RunSpec) -> list[str]:
    """Each setting of a server and of a request that differs, as text; not those that both sides are given."""
    given = {*(f"fleet.{key}" for key in (*NOT_OF_SERVERS, "servers")), "generation.temperature"}
    old, new = (
        flat(each.fleet) | {f"generation.{key}": value for key, value in request_fields(each.generation).items()}
        for each in (spec, changed)
    )
    keys = sorted((old | new).keys() - given)
    return [f"{key}: {old.get(key)} -> {new.get(key)}" for key in keys if old.get(key) != new.get(key)]


def _draw(reading: prompts.Reading, terms: Terms) -> list[Prompt]:
    """So many of the prompts, each equally likely, in one pass."""
    draw, drawn = random.Random(terms.seed), list[Prompt]()  # noqa: S311 (a draw, no secret)
    for number, prompt in enumerate(reading):
        if number < terms.prompts:
            drawn.append(prompt)
        elif (place := draw.randrange(number + 1)) < terms.prompts:
            drawn[place] = prompt
    return sorted(drawn, key=lambda prompt: prompt.index)


def _served(
    spec: RunSpec, root: Path, side: str, drawn: Sequence[Prompt], terms: Terms, times: int, tell: Callable[[str], None]
) -> list[Said]:
    """The answers of one server with these settings, so many times."""
    one: dict[str, Any] = {"name": f"{spec.fleet_name}-{side}"}
    one |= {"urls": spec.fleet.urls[:1]} if isinstance(spec.fleet, ExternalFleet) else {"servers": 1}
    # No store: nothing is uploaded, so that of the run has no say.
    alone = {"fleet": spec.fleet.model_copy(update=one), "store": StoreGroup()}
    the_fleet, _ = up(spec.model_copy(update=alone), root)
    the_fleet.wait_ready(spec.fleet.start_timeout_s, tell)  # stops what does not come up
    try:
        server, said = the_fleet.servers[0], list[Said]()
        limits, model = the_fleet.limits(server.name), the_fleet.model_name()
        at_once = limits.max_running_requests or _UNKNOWN_ROOM
        sampling = {**request_fields(spec.generation), "temperature": terms.temperature}
        asked = {"max_tokens": terms.max_tokens, "context_length": limits.context_length, "sampling": sampling}

        async def all_of_them() -> dict[int, Answer]:
            async with aclosing(ServerClient(url=server.url, key=the_fleet.key, model=model, connections=at_once)) as c:
                return await answers(c, drawn, at_once, timeout_s=_TIMEOUT_S, **asked)

        for number in range(times):
            began = time.monotonic()
            with the_fleet.lease("dfexp equivalence"):
                said.append(asyncio.run(all_of_them()))
            took = f"{time.monotonic() - began:.0f} s"
            tell(f"{side}, pass {number + 1} of {times}: {len(said[-1])} of {len(drawn)} prompts answered in {took}")
            if not the_fleet.is_process_alive(server.name):
                raise FleetError(f"server {server.name} of {side} died while it answered. Its log: {server.log}.")
        return said
    finally:
        the_fleet.down()  # also one that a killed comparison left behind


def _examples(reference: Said, other: Said) -> list[dict[str, Any]]:
    """The first few answers that differ, around the place where they part."""
    found: list[dict[str, Any]] = []
    for index in sorted(reference.keys() & other.keys()):
        texts = {"reference": reference[index].text, "changed": other[index].text}
        if (place := first_difference(*texts.values())) is not None and len(found) < _SHOWN:
            shown = {side: text[max(0, place - _BEFORE) : place + _AFTER] for side, text in texts.items()}
            found.append({"prompt": index, "from character": place, **shown})
    return found
