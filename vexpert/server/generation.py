"""The engine requests that answer one HTTP request: started together, ended together."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import partial

from vexpert.engine.sampling_params import SamplingParams
from vexpert.log import get_logger
from vexpert.server.deltas import merge
from vexpert.server.engine_client import AsyncEngine
from vexpert.server.pause import Pause
from vexpert.server.progress import Delta, Failure, RequestTimeoutError, SlowReaderError, Update
from vexpert.server.prompts import Prompt

logger = get_logger(__name__)
MAX_BACKLOG = 2**26  # bytes of a stream that wait for its reader


@dataclass(frozen=True)
class Job:
    """What to generate: one engine request per prompt."""

    request_id: str
    prompts: Sequence[Prompt]
    params: Sequence[SamplingParams]  # of each prompt
    adapter: str | None
    stream: bool
    timeout: float | None = None  # seconds from the arrival of the request; None: any time
    version: int | None = None  # of the adapter that the prompts were made for; None: of any
    prompt_only: bool = False  # the caller wants the prompt's log-probabilities, not the output


class Generation:
    """A running job. Close it whatever happens: what still runs is aborted then."""

    def __init__(self, engine: AsyncEngine, job: Job, ends: float | None) -> None:
        self._engine = engine
        self._job = job
        self._updates: list[tuple[int, Update]] = []
        self._backlog = 0  # bytes of the updates
        self._failure: Failure | None = None  # comes after the updates
        self._pause = Pause()
        self._open = {i: f"{job.request_id}-{i}" for i in range(len(job.prompts))}
        self._deadline: asyncio.TimerHandle | None = None
        if ends is not None:
            late = RequestTimeoutError(job.timeout)
            self._deadline = asyncio.get_running_loop().call_at(ends, self._fail, late)

    @classmethod
    async def start(cls, engine: AsyncEngine, job: Job, ends: float | None = None) -> "Generation":
        """Submit every prompt. If one is refused none runs, and its error is raised.

        `ends`: the event loop's time at which the job fails with RequestTimeoutError.
        """
        generation = cls(engine, job, ends)
        try:
            await engine.prepare(job.params[0])  # all prompts share the constraint
            # All in one go: a request waits for the end of a step before it is taken.
            await asyncio.gather(*(generation._submit(i) for i in generation._open))
        except BaseException:
            generation.close()
            raise
        return generation

    async def _submit(self, i: int) -> None:
        prompt = self._job.prompts[i]
        await self._engine.add(
            self._open[i],
            prompt.text,
            prompt.token_ids,
            self._job.params[i],
            adapter=self._job.adapter,
            version=self._job.version,
            every_step=self._job.stream,
            sink=partial(self._take, i),
        )

    def _take(self, i: int, update: Update | Failure) -> None:
        if not isinstance(update, Update):
            self._fail(update)
            return
        self._updates.append((i, update))
        self._backlog += update.size()
        self._pause.end()
        if self._job.stream and self._backlog > MAX_BACKLOG and len(self._updates) > 1:
            logger.warning("%s is aborted: its client reads too slowly", self._job.request_id)
            self._updates.clear()
            size = f"{self._backlog / 2**20:.0f} MiB"
            message = f"{size} of this stream wait for the client; read faster, or ask for less"
            self._fail(SlowReaderError(message))

    def _fail(self, failure: Failure) -> None:
        """Abort what runs; the reader gets `failure` after what has come."""
        self.close()
        self._failure = self._failure or failure
        self._pause.end()

    async def __aiter__(self) -> AsyncIterator[tuple[int, Update]]:
        """(prompt's index, update) until every prompt is answered. Raises its Failure."""
        async for burst in self.bursts(None):
            assert burst is not None
            for pair in burst:
                yield pair

    async def bursts(self, seconds: float | None) -> AsyncIterator[list[tuple[int, Update]] | None]:
        """As iteration, with all that has come at once, as one update for each prompt.

        None whenever nothing has come for `seconds`.
        """
        while self._open or self._updates or self._failure is not None:
            if self._updates:
                yield self._drain()
            elif self._failure is not None:
                raise self._failure
            elif not await self._pause.wait(seconds):
                yield None

    def _drain(self) -> list[tuple[int, Update]]:
        """What has come and was not read, one update for each prompt."""
        by_prompt: dict[int, list[Update]] = {}
        for i, update in self._updates:
            by_prompt.setdefault(i, []).append(update)
            if update.finished:
                self._open.pop(i, None)
        self._updates, self._backlog = [], 0
        bare = self._job.prompt_only
        merged = ((i, merge(updates)) for i, updates in by_prompt.items())
        return [(i, _without_output(update) if bare else update) for i, update in merged]

    def close(self) -> None:
        """Abort what still runs."""
        self._pause.close()
        if self._deadline is not None:
            self._deadline.cancel()
        for request_id in self._open.values():
            self._engine.abort(request_id)
        self._open = {}


def _without_output(update: Update) -> Update:
    """The step's token was not asked for, so it says nothing of why the output ends."""
    ended = [delta for delta in update.deltas if delta.finish_reason is not None]
    bare = [Delta(delta.index, "", [], None, "length", None) for delta in ended]
    return update._replace(deltas=bare)
