"""One row at one server: the request, and what its answer or its error means for the row, the server and the run."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from dfexp.errors import AccessDenied, RateLimited, RequestError, Unreachable
from dfexp.fleet import scrub
from dfexp.generate.identity import request_fields
from dfexp.generate.lane import Lane
from dfexp.generate.recorder import Recorder
from dfexp.generate.status import Overview
from dfexp.generate.verdicts import FailureStreak, answer_s, is_final, retry_wait_s
from dfexp.generate.work import Job, WorkQueue
from dfexp.records import SIMULATED, Answer, Completion, Failure, Prompt

if TYPE_CHECKING:
    from dfexp.generate.loop import Setup

MOST_FAILURES_IN_A_ROW = 50


class Serving:
    """Serves rows, any number at once; what becomes of each goes to the recorder, or back into the queue.

    `streak` holds failures that do not count yet; `refused_since` is when servers began to do nothing but turn
    requests away (monotonic seconds), None where they do not.
    """

    def __init__(
        self, setup: Setup, queue: WorkQueue, recorder: Recorder, overview: Overview, fail: Callable[[str], None]
    ) -> None:
        """Args: fail, called with the reason when going on would burn rows."""
        self._s, self._generation = setup, setup.spec.generation
        self._queue, self._recorder, self._overview, self._fail = queue, recorder, overview, fail
        self._fields = request_fields(self._generation)
        self._draw = random.Random()  # noqa: S311 (spreads retries, guards nothing)
        self.streak = FailureStreak.of(MOST_FAILURES_IN_A_ROW)
        self.refused_since: float | None = None

    async def serve(self, lane: Lane, job: Job) -> None:
        """One row at one server."""
        generation, prompt = self._generation, self._s.prompts[job.index]
        cap = None if generation.max_tokens == "fit" else generation.max_tokens
        context = lane.limits.context_length
        sampling = dict(self._fields)
        if generation.seed is not None:
            sampling["seed"] = (generation.seed + job.index) % 2**31
        try:
            answer = await lane.client.complete(
                prompt.messages,
                max_tokens=cap,
                context_length=context,
                timeout_s=answer_s(generation, cap or context),
                sampling=sampling,
            )
        except RequestError as error:
            self._take_error(lane, job, prompt, error)
        else:
            self._take_answer(lane, job, prompt, answer)

    def _take_answer(self, lane: Lane, job: Job, prompt: Prompt, answer: Answer) -> None:
        flags = self._overview.flags(answer)
        row = Completion(
            index=job.index, id=prompt.id, messages=prompt.messages, text=answer.text,
            finish_reason=answer.finish_reason, prompt_tokens=answer.prompt_tokens,
            completion_tokens=answer.completion_tokens, max_tokens=answer.max_tokens, server=lane.name,
            config_id=lane.config_id, attempt=job.attempt, submitted_at=answer.submitted_at, latency_s=answer.latency_s,
            flags=flags + ((SIMULATED,) if self._s.fleet.engine.name == SIMULATED else ()),
        )  # fmt: skip
        self._recorder.add(row)  # before all that only watches
        for failure in self.streak.success():
            self._recorder.add_failure(failure)
        self.refused_since = None
        lane.completed(time.monotonic())
        self._overview.answered(lane.name, job.index, answer, flags)

    def _take_error(self, lane: Lane, job: Job, prompt: Prompt, error: RequestError) -> None:
        now, words = time.monotonic(), scrub(str(error), self._s.fleet.key)
        self.refused_since = (self.refused_since or now) if isinstance(error, RateLimited) else None
        if isinstance(error, RateLimited):
            lane.pause(now, retry_wait_s(error, job.attempt, self._draw) or 1.0)
        elif isinstance(error, (Unreachable, AccessDenied)):
            lane.suspect(denied=error.stops_run)
        if error.stops_run and not self._overview.progress.rows:
            self._fail(f"{lane.name}: {words}. Every row would fail like this one.")
        if error.retryable and error.counts_as_attempt:
            lane.stumbled()
        if not is_final(error, job.attempt, self._generation.max_attempts):
            lane.failed()
            wait_s = retry_wait_s(error, job.attempt, self._draw)
            attempt = job.attempt + error.counts_as_attempt
            self._queue.put_back(Job(index=job.index, attempt=attempt, avoid=lane.name), not_before=now + wait_s)
            return
        self._overview.progress.failed()
        failure = Failure(
            index=job.index, id=prompt.id, kind=error.kind, message=words, attempts=job.attempt, server=lane.name,
            config_id=lane.config_id, at=time.time(),
        )  # fmt: skip
        if self.streak.failure(failure):
            self._fail(
                f"{self.streak.length} rows failed one after the other, the last with: {words}. They are not "
                "counted as failed: fix the cause, then resume."
            )
