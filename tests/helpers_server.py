"""A server around any engine, in a thread of this process, for tests."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import httpx
import openai
import uvicorn
from helpers_engine_thread import EngineThread
from helpers_fake_engine import (
    BASE,
    EOS,
    NAMES,
    VOCAB_SIZE,
    FakeEngine,
    FakeTokenizer,
    make_fake_engine,
    right_answer,
)
from helpers_wait import wait_for

from vexpert.server import scrape
from vexpert.server.app import create_app
from vexpert.server.listen import bind
from vexpert.server.options import ServerOptions

__all__ = ["BASE", "EOS", "NAMES", "VOCAB_SIZE", "FakeEngine", "FakeTokenizer", "right_answer"]
ENGINES: dict[str, Callable[[], Any]] = {"fake": make_fake_engine}


@dataclass
class RunningServer:
    """A server in a thread of this process."""

    url: str
    engine: Any
    app: Any
    server: uvicorn.Server
    http: httpx.Client

    def client(self, **options: Any) -> openai.OpenAI:
        options = {"api_key": "none", "max_retries": 0, "timeout": 60.0, **options}
        return openai.OpenAI(base_url=f"{self.url}/v1", **options)

    def async_client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(
            base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60.0
        )

    def post(self, path: str, **options: Any) -> httpx.Response:
        return self.http.post(path, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.http.get(path, **options)

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """The result of a coroutine, run in the server's event loop."""
        [listening] = self.server.servers
        return asyncio.run_coroutine_threadsafe(work, listening.get_loop()).result(60)

    def ask(self, model: str, word: str) -> str:
        """The answer of `model` to `word`, greedy."""
        messages = [{"role": "user", "content": word}]
        body = {"model": model, "messages": messages, "temperature": 0}
        response = self.post("/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text
        return str(response.json()["choices"][0]["message"]["content"])


@contextlib.contextmanager
def serving(engine: Any, options: ServerOptions | None = None) -> Iterator[RunningServer]:
    """Serve an engine, or a host of one, on a free port until the end of the block."""
    host = engine if hasattr(engine, "connect") else EngineThread(engine)
    options = options or ServerOptions(served_model_names=(BASE,), status_interval=None)
    app = create_app(host, options)
    bound = bind("127.0.0.1", 0)
    config = uvicorn.Config(
        app,
        log_config=None,
        lifespan="on",
        timeout_graceful_shutdown=1,
        # Longer than clients keep a connection: none is closed as its next request is sent.
        timeout_keep_alive=3600,
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
    # The metrics page shows what the engine says, however long a machine holds that up.
    patience = mock.patch.object(scrape, "SECONDS", 60.0)
    patience.start()
    thread.start()
    url = f"http://127.0.0.1:{bound.getsockname()[1]}"
    try:
        wait_for(lambda: server.started)
        with httpx.Client(base_url=url, timeout=60.0) as http:
            yield RunningServer(url, engine, app, server, http)
    finally:
        server.should_exit = True
        thread.join(60)
        bound.close()
        patience.stop()
        assert not thread.is_alive(), "the server did not end"
