"""The FastAPI application: routes, errors, limits, and the engine's lifetime."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from vexpert import __version__
from vexpert.server.deadlines import DeadlineMiddleware
from vexpert.server.errors import install_error_handlers
from vexpert.server.head import HeadMiddleware
from vexpert.server.interface import EngineHost
from vexpert.server.middleware import (
    OPEN_PATHS,
    ApiKeyMiddleware,
    BodyLimitMiddleware,
    DrainMiddleware,
    UnexpectedErrorMiddleware,
)
from vexpert.server.openapi import DescribedApp
from vexpert.server.options import ServerOptions
from vexpert.server.requests_log import RequestIdMiddleware
from vexpert.server.routes import adapters, chat, completions, health, models, tokenize, web
from vexpert.server.service import Service
from vexpert.server.status_line import log_status


def create_app(engine: EngineHost, options: ServerOptions | None = None) -> FastAPI:
    """An app that serves `engine`, connected from startup to shutdown; it ends with the app.

    `app.state.service` is the Service behind the routes. Raises ConfigError.
    """
    options = options or ServerOptions()
    service = Service(engine, options)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with running(service):
            yield

    app = DescribedApp(title="vexpert", version=__version__, lifespan=lifespan)
    app.state.service = service
    install_error_handlers(app)
    for module in (chat, completions, models, tokenize, adapters, health):
        app.include_router(module.router)
    if options.web:
        app.include_router(web.router)
    _add_layers(app, service, options)
    return app


def _add_layers(app: FastAPI, service: Service, options: ServerOptions) -> None:
    """The last one added sees a request first."""
    app.add_middleware(HeadMiddleware)
    app.add_middleware(UnexpectedErrorMiddleware)
    app.add_middleware(
        BodyLimitMiddleware, limit=options.max_body_bytes, seconds=options.body_timeout
    )
    app.add_middleware(DrainMiddleware, service=service)
    app.add_middleware(DeadlineMiddleware, service=service, seconds=options.time_limit)
    if service.keys:
        open_paths = (*OPEN_PATHS, *web.PATHS) if options.web else OPEN_PATHS
        app.add_middleware(ApiKeyMiddleware, keys=service.keys, open_paths=open_paths)
    if options.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=options.allowed_origins,
            allow_methods=options.allowed_methods,
            allow_headers=options.allowed_headers,
            allow_credentials=options.allow_credentials,
            expose_headers=["X-Request-Id"],
        )
    app.add_middleware(RequestIdMiddleware, access_log=options.access_log)


@asynccontextmanager
async def running(service: Service) -> AsyncIterator[None]:
    """The engine's connection and the status line, from here to the end of the block."""
    await service.engine.start()
    interval = service.options.status_interval
    status = asyncio.ensure_future(log_status(service.engine, interval)) if interval else None
    try:
        yield
    finally:
        if status is not None:
            status.cancel()
            await asyncio.gather(status, return_exceptions=True)
        await service.engine.stop()
        service.prompts.close()
        await asyncio.to_thread(service.traces.close)
