"""One row at one server: the request, and what its answer or its error means for the row, the server and the run."""

import asyncio
import random
import time
from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING

from dfexp.errors import RateLimited, Refused, RequestError, TimedOut, Unreachable
from dfexp.fleet import scrub
from dfexp.generate import verdicts
from dfexp.generate.identity import request_fields
from dfexp.generate.lane import Lane
from dfexp.generate.recorder import Recorder
from dfexp.generate.status import Overview
from dfexp.generate.verdicts import FailureStreak, Pace, SpoiledStreak
from dfexp.generate.work import Job, WorkQueue
from dfexp.records import SIMULATED, Answer, Completion, Failure, Prompt

if TYPE_CHECKING:
    from dfexp.generate.loop import Setup

MOST_FAILURES_IN_A_ROW = 50
_SHOWN_CHARACTERS = 200
_AWAITED_S = 5.0  # between looks of a row that waits for a server which is away
_Setting = tuple[str, str]  # a server's name and its configuration


class Serving:
    """Serves rows, any number at once; what becomes of each goes to the recorder, or back into the queue.

    `streak` holds failures that do not count yet; `refused_since` is when servers began to do nothing but turn
    requests away (monotonic seconds), None where they do not.
    """

    def __init__(
        self, setup: "Setup", queue: WorkQueue, recorder: Recorder, overview: Overview, fail: Callable[[str], None]
    ) -> None:
        """Args: fail, called with the reason when going on would burn rows."""
        self._s, self._generation = setup, setup.spec.generation
        self._queue, self._recorder, self._overview, self._fail = queue, recorder, overview, fail
        self._fields = request_fields(self._generation)
        self._draw = random.Random()  # noqa: S311 (spreads retries, guards nothing)
        self._lanes: dict[str, Lane] = {}  # that were given a row
        self._reseeded: set[int] = set()  # rows whose answer was not taken: the next one must be another
        # By row and kind: the first server that rejected it, how many answers that one had given, and rows rejected
        # in a row, by then.
        self._rejected = defaultdict[int, dict[str, tuple[str, int, int]]](dict)
        self._renamed = set[str]()  # servers that answer as another model, which is told
        self._paces = defaultdict[_Setting, Pace](Pace)
        self._open: dict[asyncio.Timeout, tuple[_Setting, float, int | None]] = {}  # when sent, and the most tokens
        self.streak, self._spoiled = FailureStreak.of(MOST_FAILURES_IN_A_ROW), SpoiledStreak(MOST_FAILURES_IN_A_ROW)
        self.refused_since: float | None = None

    async def serve(self, lane: Lane, job: Job) -> None:
        """One row at one server."""
        generation, prompt, self._lanes[lane.name] = self._generation, self._s.prompts[job.index], lane
        cap = None if generation.max_tokens == "fit" else generation.max_tokens
        context = lane.limits.context_length
        sampling, is_reseeded = dict(self._fields), job.index in self._reseeded
        if generation.seed is not None:
            sampling["seed"] = verdicts.seed_of(generation.seed, job.index, job.attempt if is_reseeded else 1)
        setting, most, sent = (lane.name, lane.config_id), cap or context, asyncio.get_running_loop().time()
        limit_s = verdicts.answer_s(generation, most, self._paces[setting].slowest)
        limit = asyncio.timeout_at(sent + limit_s)
        try:
            async with limit:
                self._open[limit] = setting, sent, most
                try:
                    answer = await lane.client.complete(
                        prompt.messages, max_tokens=cap, context_length=context, timeout_s=None, sampling=sampling
                    )
                finally:
                    del self._open[limit]
        except RequestError as error:
            self._take_error(lane, job, prompt, error)
        except TimeoutError:
            took_s = asyncio.get_running_loop().time() - sent
            words = f"no whole answer in {took_s:.0f} s, the most that {most or 'any number of'} tokens may take here"
            self._take_error(lane, job, prompt, TimedOut(f"{words} (generation.slowest_tok_per_s)"))
        else:
            self._learn(setting, answer)
            self._take_answer(lane, job, prompt, answer, is_reseeded and generation.seed is not None)

    def _learn(self, setting: _Setting, answer: Answer) -> None:
        """Let an answer tell how fast its server is. Requests that wait there get the time that is right by that."""
        pace = self._paces[setting]
        if pace.answered(answer.completion_tokens, answer.latency_s):
            for limit, (place, sent, most) in self._open.items():
                if place == setting and not limit.expired():
                    limit.reschedule(sent + verdicts.answer_s(self._generation, most, pace.slowest))

    def _take_answer(self, lane: Lane, job: Job, prompt: Prompt, answer: Answer, is_reseeded: bool) -> None:
        flags = self._overview.flags(lane.name, answer)
        self.refused_since = None
        if lane.name not in self._renamed and verdicts.is_other_model(lane.model, answer.model):
            self._renamed.add(lane.name)
            detail = f"the server answers as model {_shown(answer.model or '')}; asked was {lane.model!r}"
            self._s.events.record("other_model", server=lane.name, detail=f"{detail} (fleet.model)")
        policy, kind = verdicts.policy_of(self._generation.spoiled, flags)
        if policy == "retry" and job.attempt < self._generation.max_attempts:
            self._reseeded.add(job.index)
            self._overview.progress.flags[f"{kind}_retried"] += 1
            self._put_back(job, attempt=job.attempt + 1, avoid=lane.name)
        elif policy == "fail":
            self._give_up(lane, job, prompt, kind, f"the answer has the flag {kind}: {_shown(answer.text)}")
        else:
            self._keep(lane, job, prompt, answer, flags + ("reseeded",) * is_reseeded)
        lane.completed(time.monotonic(), answer.completion_tokens)
        if self._spoiled.answered(lane.name, flags, [one.name for one in self._lanes.values() if one.serves]):
            self._fail(
                f"{self._spoiled.length} answers one after the other, from all servers, were empty or garbage, the "
                f"last from {lane.name}: {_shown(answer.text)}. Rows that were kept have a flag: fix the cause, resume."
            )

    def _keep(self, lane: Lane, job: Job, prompt: Prompt, answer: Answer, flags: tuple[str, ...]) -> None:
        row = Completion(
            index=job.index, id=prompt.id, messages=prompt.messages, text=answer.text,
            finish_reason=answer.finish_reason, prompt_tokens=answer.prompt_tokens,
            completion_tokens=answer.completion_tokens, max_tokens=answer.max_tokens, server=lane.name,
            config_id=lane.config_id, attempt=job.attempt, submitted_at=answer.submitted_at, latency_s=answer.latency_s,
            flags=flags + ((SIMULATED,) if self._s.fleet.engine.name == SIMULATED else ()),
        )  # fmt: skip
        self._recorder.add(row)  # before all that only watches
        self._reseeded.discard(job.index)
        self._rejected.pop(job.index, None)
        for failure in self.streak.success():
            self._recorder.add_failure(failure)
        self._overview.answered(lane.name, job.index, answer, flags)

    def _take_error(self, lane: Lane, job: Job, prompt: Prompt, error: RequestError) -> None:
        now, words = time.monotonic(), scrub(str(error), self._s.fleet.key)
        is_refusal = isinstance(error, RateLimited)
        self.refused_since = (self.refused_since or now) if is_refusal else None
        if isinstance(error, RateLimited):
            lane.pause(now, verdicts.pause_s(error, self._draw))
        elif isinstance(error, Unreachable):
            lane.suspect()
        others = [one for one in self._lanes.values() if one is not lane and one.serves_soon(now)]
        beside, may_move = any(not one.rejections.many for one in others), False
        if error.stops_run or isinstance(error, Refused):
            before = (lane.name, lane.done, lane.rejections.in_a_row)
            first, answers, rejected = self._rejected[job.index].setdefault(error.kind, before)
            may_move = bool(others) and (first == lane.name or (lane.rejections.many and beside))
            give_up_s, lanes = self._generation.give_up_s, self._lanes.values()
            # One that answers others is believed, and so is one that did where no other row is left that could tell.
            # Any other is asked again while a good one may come back.
            is_alone = not len(self._queue) and len(self._rejected) == 1 and sum(len(one.tasks) for one in lanes) <= 1
            is_believed = lane.done > answers or (is_alone and lane.done > 0 and not rejected)
            is_doubted = first == lane.name and not others and not is_believed
            waits = is_doubted and any(one is not lane and one.may_return(now, give_up_s) for one in lanes)
            lane.rejected(now, words, is_denied=error.stops_run, beside=beside or waits)
            if waits:
                lane.failed()
                self._put_back(job, attempt=job.attempt, avoid=lane.name, not_before=now + _AWAITED_S)
                return
        if error.retryable and error.counts_as_attempt:
            lane.stumbled()
        if verdicts.is_final(error, job.attempt, self._generation.max_attempts, may_move=may_move):
            self._give_up(lane, job, prompt, error.kind, words)
            return
        lane.failed()
        wait_s = verdicts.retry_wait_s(error, job.attempt, self._draw, elsewhere=bool(others))
        attempt, avoid = job.attempt + error.counts_as_attempt, None if is_refusal else lane.name
        self._put_back(job, attempt=attempt, avoid=avoid, not_before=now + wait_s)

    def _put_back(self, job: Job, *, attempt: int, avoid: str | None, not_before: float = 0.0) -> None:
        self._queue.put_back(Job(index=job.index, attempt=attempt, avoid=avoid), not_before=not_before)

    def _give_up(self, lane: Lane, job: Job, prompt: Prompt, kind: str, words: str) -> None:
        """A row has failed for good."""
        self._overview.progress.failures += 1
        self._rejected.pop(job.index, None)
        failure = Failure(
            index=job.index, id=prompt.id, kind=kind, message=scrub(words, self._s.fleet.key), attempts=job.attempt,
            server=lane.name, config_id=lane.config_id, at=time.time(),
        )  # fmt: skip
        if self.streak.failure(failure):
            self._fail(
                f"{self.streak.length} rows failed one after the other, the last with: {failure.message}. They are not "
                "counted as failed: fix the cause, then resume."
            )


def _shown(text: str) -> str:
    return repr(text[:_SHOWN_CHARACTERS]) + ("..." if len(text) > _SHOWN_CHARACTERS else "")
