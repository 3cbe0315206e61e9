"""The metrics page, also while the engine does not answer: with what it said last."""

import asyncio

from vexpert.engine.outputs import EngineStats
from vexpert.lora.info import AdapterInfo
from vexpert.server.engine_client import AsyncEngine
from vexpert.server.metrics import Metrics
from vexpert.server.progress import EngineFailedError
from vexpert.server.recorder import Recorder

SECONDS = 2.0  # that the engine may take; a step may be longer


class Scraper:
    """Asks one engine, one question at a time, however many want the page."""

    def __init__(self, engine: AsyncEngine, model_name: str, recorder: Recorder) -> None:
        self._engine, self._recorder = engine, recorder
        self._metrics = Metrics(model_name, recorder)
        self._last: tuple[EngineStats | None, list[AdapterInfo]] = (None, [])
        self._asking: asyncio.Task[bool] | None = None

    async def page(self) -> bytes:
        """The page, within SECONDS."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.ensure_future(self._ask())
        asking = self._asking
        await asyncio.wait({asking}, timeout=SECONDS)
        is_answered = asking.done() and asking.result()
        return self._metrics.page(*self._last, self._engine.restarts, is_answered)

    async def _ask(self) -> bool:
        """Whether the engine answered; then it is kept."""
        try:
            own = self._recorder.labels.own()
            infos = await self._engine.adapters_named(own)
            stats = await self._engine.stats()
        except EngineFailedError:
            return False
        fresh = self._recorder.labels.own() - own  # used meanwhile: nobody was asked of them
        self._recorder.forget({info.name for info in infos} | fresh)
        self._last = stats, infos
        return True
