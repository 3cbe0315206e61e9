"""What the routes share: the engine, the names it is served under, and how a name is resolved."""

import asyncio
import time
from pathlib import Path

from starlette.requests import Request

from vexpert.config import cut, shown
from vexpert.errors import AdapterError, ConfigError
from vexpert.lora.adapter_name import check_name
from vexpert.lora.info import EXAMINED_FOR_NAMES, SHOWN_NAMES, UNUSABLE, ListedNames
from vexpert.lora.opening import resolved_inside
from vexpert.server.daemon_pool import DaemonPool
from vexpert.server.deadlines import Unanswered
from vexpert.server.engine_client import AsyncEngine
from vexpert.server.errors import ApiError
from vexpert.server.interface import EngineHost
from vexpert.server.keys import METRICS, check_names
from vexpert.server.options import ServerOptions
from vexpert.server.progress import ShuttingDownError
from vexpert.server.prompts import Own, PromptBuilder
from vexpert.server.recorder import Recorder
from vexpert.server.requests_log import NOTE
from vexpert.server.scrape import Scraper
from vexpert.server.tools.formats import FORMATS, ToolFormat
from vexpert.server.tracing import make_traces

MOST_SHOWN = 1000  # characters of a path
PATH_CHECKS = 4  # at once


class Service:
    """One served model. Raises ConfigError when a base name is an adapter's too."""

    is_draining = False  # a signal has come: no new requests
    active = 0  # requests for work that have not been answered in full

    def __init__(self, host: EngineHost, options: ServerOptions) -> None:
        self.options = options
        self._paths = DaemonPool(PATH_CHECKS, "vexpert-path")  # a dead file system holds them up
        self.unanswered: set[Unanswered] = set()  # requests whose answer has not begun
        self.recorder = Recorder()
        limits = options.max_queue_len, options.keep_alive, options.engine_restarts
        self.engine = AsyncEngine(host, self.recorder, *limits, options.step_timeout)
        self.facts = host.facts
        self.prompts = PromptBuilder(host.tokenizer, self.facts, options.chat_template)
        self.traces = make_traces(options.otlp_traces_endpoint)
        self.base_names = options.served_model_names or (self.facts.name,)
        self.scraper = Scraper(self.engine, self.base_names[0], self.recorder)
        self.created = int(time.time())
        self.keys = options.keys()
        limited = [names for names in self.keys.values() if names is not None]
        check_names(limited, self.base_names, self.facts.adapters)
        for name in self.base_names:
            if name == METRICS:
                raise ConfigError(f"served_model_name={name!r}: stands for that page; rename it")
        try:
            for name in self.facts.adapters:
                self.check_name(name)
        except AdapterError as error:
            raise ConfigError(str(error)) from error

    def check_name(self, name: str) -> None:
        """Raise AdapterError for an adapter's name that means something else here."""
        check_name(name, frozenset(self.base_names))

    def cut(self, message: str) -> None:
        """End every request: 503 that says `message`, or an error event in a stream."""
        for request in list(self.unanswered):
            request.end(ShuttingDownError(message))
        self.engine.cut(message)

    def adapter_of(self, model: str) -> str | None:
        """The adapter that `model` names, alone or as BASE:ADAPTER; None: the base model."""
        if model in self.base_names:
            return None
        bases = [base for base in self.base_names if model.startswith(f"{base}:")]
        return model.removeprefix(f"{max(bases, key=len)}:") if bases else model

    def tool_format(self) -> ToolFormat | None:
        """How the model writes tool calls, if the server was told."""
        name = self.options.tool_call_parser
        return None if name is None else FORMATS[name]

    def admit(self, request: Request, model: str, sequences: int = 1) -> None:
        """Raise ApiError if this key may not use `model`, OverloadedError if the queue is full."""
        request.scope[NOTE].model = model
        self.check_allowed(request, model)
        self.engine.check_room(sequences)

    def check_allowed(self, request: Request, model: str) -> None:
        """Raise ApiError if the request's API key is not for `model`."""
        allowed = allowed_models(request)
        if allowed is None:
            return
        name = self.adapter_of(model)
        names = set(self.base_names) if name is None else {name}
        if not names & (allowed - {METRICS}):
            message = f"this API key may not use model {shown(model)}"
            raise ApiError(message, 403, "model", "model_not_allowed")

    def check_may_change_adapters(self, request: Request) -> None:
        """Raise ApiError if the request's API key is for some models only."""
        if allowed_models(request) is not None:
            message = "this API key is for some models only and cannot load or unload adapters"
            raise ApiError(message, 403, code="not_allowed")

    def check_may_read_metrics(self, request: Request) -> None:
        """Raise ApiError if the request's API key is for some models only: the page names all."""
        allowed = allowed_models(request)
        if allowed is not None and METRICS not in allowed:
            message = f"this API key is for some models only; list {METRICS} among them in its file"
            raise ApiError(message, 403, code="not_allowed")

    async def adapter_path(self, path: str) -> str:
        """`path`, without links where there are allowed roots.

        Raises ApiError for a folder outside of them, or with links out.
        """
        roots = self.options.allowed_adapter_roots
        if not roots or not path:  # the engine refuses an empty one
            return path
        real = await asyncio.wrap_future(self._paths.submit(_allowed_path, path, roots))
        if real is None:
            message = (
                f"lora_path={shown(path)}: adapters may be loaded from {', '.join(roots)} only"
            )
            raise ApiError(message, 403, "lora_path", "path_not_allowed")
        return real

    async def check_folder(self, path: str, error: AdapterError) -> None:
        """Raise ApiError where no folder is at `path`: `error`, with the path as the field."""
        folder = Path(path).absolute()
        if await asyncio.wrap_future(self._paths.submit(_is_folder, folder)):
            return
        message = str(error)
        if not Path(path).is_absolute() and "\0" not in path:
            told = cut(str(folder), MOST_SHOWN)
            message += f"; a relative path starts at the server's folder: {told}"
        raise ApiError(message, 400, "lora_path") from error

    async def own_template(self, request: Request, adapter: str | None) -> Own | None:
        """The chat template of `adapter`, if there is one. Raises AdapterError."""
        if adapter is None:
            return None
        return Own(await self.engine.adapter_template(adapter), _caller(request))

    async def _some_names(self, allowed: frozenset[str] | None) -> ListedNames:
        """Some of `allowed` names that a request may use, None: of all; base names first."""
        bases = [name for name in self.base_names if allowed is None or name in allowed]
        if allowed is None:
            names, more = await self.engine.some_adapter_names(SHOWN_NAMES)
        else:
            others = sorted(allowed - {METRICS, *bases})
            infos = await self.engine.adapters_named(others[:EXAMINED_FOR_NAMES])
            names = [info.name for info in infos if info.state not in UNUSABLE]
            more = len(others[EXAMINED_FOR_NAMES:])
        known = bases + names
        return ListedNames(known[:SHOWN_NAMES], more + len(known[SHOWN_NAMES:]))

    async def unknown_model(self, request: Request, model: str) -> ApiError:
        """The 404 for a name that nobody serves; tells names that the request's key is for."""
        known = await self._some_names(allowed_models(request))
        message = f"model {shown(model)} does not exist; known: {known}"
        return ApiError(message, 404, "model", "model_not_found")


def _allowed_path(path: str, roots: tuple[str, ...]) -> str | None:
    """A folder without links, if it and all that lies in it is inside one of `roots`; else None."""
    try:
        folder = resolved_inside(path, roots)
        inner = folder.iterdir() if folder is not None and folder.is_dir() else ()
        if folder is None or not all(resolved_inside(each, roots) for each in inner):
            return None
    except (OSError, ValueError):
        return None
    return str(folder)


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


def _caller(request: Request) -> str:
    """Who asks: by the API key, or by the address on a server without keys."""
    key = request.headers.get("authorization") if "vexpert_models" in request.scope else None
    return key or ("" if request.client is None else request.client.host)


def allowed_models(request: Request) -> frozenset[str] | None:
    """The names that the request's API key is for; None: all."""
    allowed: frozenset[str] | None = request.scope.get("vexpert_models")
    return allowed


def service_of(request: Request) -> Service:
    """The service of the app that got `request`."""
    service = request.app.state.service
    assert isinstance(service, Service)
    return service
