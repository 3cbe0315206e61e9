"""What the routes share: the engine, the names it is served under, and how a name is resolved."""

import time

from starlette.requests import Request

from vexpert.errors import ConfigError
from vexpert.server.engine_thread import AsyncEngine
from vexpert.server.errors import ApiError
from vexpert.server.interface import EngineProtocol
from vexpert.server.metrics import Metrics
from vexpert.server.options import ServerOptions
from vexpert.server.prompts import PromptBuilder
from vexpert.server.recorder import Recorder

SHOWN_NAMES = 20


class Service:
    """One served model. Raises ConfigError when a base name is an adapter's too."""

    def __init__(self, engine: EngineProtocol, options: ServerOptions) -> None:
        self.options = options
        self.recorder = Recorder()
        self.engine = AsyncEngine(engine, self.recorder)
        self.prompts = PromptBuilder(engine)
        self.info = engine.model_info
        self.max_model_len = engine.max_model_len
        self.base_names = options.served_model_names or (self.info.name,)
        self.metrics = Metrics(self.base_names[0], self.recorder)
        self.created = int(time.time())
        for info in engine.adapters():
            if info.name in self.base_names:
                raise ConfigError(
                    f"adapter {info.name!r} has the name of the base model; rename it"
                )

    async def metrics_page(self) -> bytes:
        """The page for Prometheus."""
        infos = self.engine.engine.adapters()
        await self.engine.forget_counts({info.name for info in infos})
        stats = await self.engine.stats()
        return self.metrics.page(stats, infos)

    def adapter_of(self, model: str) -> str | None:
        """The adapter a request names; None: the base model."""
        return None if model in self.base_names else model

    def names(self) -> list[str]:
        """Every name a request may use: base names, then adapters."""
        return [*self.base_names, *(info.name for info in self.engine.adapters())]

    def unknown_model(self, model: str) -> ApiError:
        """The 404 for a name that nobody serves."""
        names = self.names()
        more = f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
        known = ", ".join(names[:SHOWN_NAMES]) + more
        message = f"model {model!r} does not exist; known: {known}"
        return ApiError(message, 404, "model", "model_not_found")


def service_of(request: Request) -> Service:
    """The service of the app that got `request`."""
    service = request.app.state.service
    assert isinstance(service, Service)
    return service
