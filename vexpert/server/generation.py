"""The engine requests that answer one HTTP request: started together, ended together."""

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import partial

from vexpert.engine.sampling_params import SamplingParams
from vexpert.server.engine_client import AsyncEngine
from vexpert.server.progress import Failure, RequestTimeoutError, Update
from vexpert.server.prompts import Prompt


@dataclass(frozen=True)
class Job:
    """What to generate: one engine request per prompt."""

    request_id: str
    prompts: Sequence[Prompt]
    params: Sequence[SamplingParams]  # of each prompt
    adapter: str | None
    stream: bool
    timeout: float | None = None  # seconds from the start; None: any time
    prompt_only: bool = False  # the caller wants the prompt's log-probabilities, not the output


class Generation:
    """A running job. Close it whatever happens: what still runs is aborted then."""

    def __init__(self, engine: AsyncEngine, job: Job) -> None:
        self._engine = engine
        self._job = job
        self._updates: asyncio.Queue[tuple[int, Update | Failure]] = asyncio.Queue()
        self._ends = None if job.timeout is None else time.monotonic() + job.timeout
        self._open = {i: f"{job.request_id}-{i}" for i in range(len(job.prompts))}

    @classmethod
    async def start(cls, engine: AsyncEngine, job: Job) -> "Generation":
        """Submit every prompt. If one is refused none runs, and its error is raised."""
        generation = cls(engine, job)
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
            every_step=self._job.stream,
            sink=partial(self._take, i),
        )

    def _take(self, i: int, update: Update | Failure) -> None:
        self._updates.put_nowait((i, update))

    async def __aiter__(self) -> AsyncIterator[tuple[int, Update]]:
        """(prompt's index, update) until every prompt is answered. Raises its Failure."""
        async for pair in self.every(None):
            assert pair is not None
            yield pair

    async def every(self, seconds: float | None) -> AsyncIterator[tuple[int, Update] | None]:
        """As iteration, with None whenever nothing has come for `seconds`."""
        while self._open:
            pair = await self._next(seconds)
            if pair is None:
                yield None
                continue
            i, update = pair
            if isinstance(update, Failure):
                raise update
            if update.finished:
                del self._open[i]
            yield i, (_without_output(update) if self._job.prompt_only else update)

    async def _next(self, seconds: float | None) -> tuple[int, Update | Failure] | None:
        if not self._updates.empty():
            return self._updates.get_nowait()
        left = None if self._ends is None else max(0.0, self._ends - time.monotonic())
        limits = [limit for limit in (seconds, left) if limit is not None]
        try:
            async with asyncio.timeout(min(limits, default=None)):
                return await self._updates.get()
        except TimeoutError:
            if self._ends is not None and time.monotonic() >= self._ends:
                raise RequestTimeoutError(self._job.timeout) from None
            return None

    def close(self) -> None:
        """Abort what still runs."""
        for request_id in self._open.values():
            self._engine.abort(request_id)
        self._open = {}


def _without_output(update: Update) -> Update:
    ended = [delta for delta in update.deltas if delta.finish_reason is not None]
    bare = [dataclasses.replace(d, text="", token_ids=[], logprobs=None) for d in ended]
    return dataclasses.replace(update, deltas=bare)
