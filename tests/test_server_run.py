"""Running on a socket: what the exit code says, and where the socket is bound."""

import os
import socket
import threading
from pathlib import Path

import httpx
import pytest
from helpers_engine_thread import EngineThread
from helpers_serve import serve
from helpers_server import BASE, FakeEngine
from test_server_shutdown import patient

from vexpert.server.app import create_app
from vexpert.server.listen import bind, url_of
from vexpert.server.options import ServerOptions
from vexpert.server.run import run

pytest_plugins = ["helpers_server_fixtures"]


def test_a_failed_engine_ends_the_server_with_1(fake: FakeEngine) -> None:
    fake.failure = RuntimeError("planted")
    app = create_app(EngineThread(fake), ServerOptions((BASE,), status_interval=0.01))
    answers: list[httpx.Response] = []

    def ask() -> None:
        body = {"model": BASE, "prompt": "x"}
        url = f"{url_of(bound, '127.0.0.1')}/v1/completions"
        answers.append(httpx.post(url, json=body, timeout=60))

    asking = threading.Thread(target=ask)
    with patient(), bind("127.0.0.1", 0) as bound:
        assert run(app, bound, on_ready=asking.start) == 1
    asking.join()
    assert answers[0].status_code == 503
    assert "planted" in answers[0].json()["error"]["message"]


def test_a_socket_does_not_listen_before_it_is_served() -> None:
    with bind("127.0.0.1", 0) as bound, pytest.raises(ConnectionRefusedError):
        socket.create_connection(bound.getsockname(), timeout=60)


@pytest.mark.parametrize(("host", "shown"), [("0.0.0.0", "0.0.0.0"), ("::1", "[::1]")])
def test_the_url_is_as_the_user_wrote_the_host(host: str, shown: str) -> None:
    with bind("127.0.0.1", 0) as bound:
        assert url_of(bound, host) == f"http://{shown}:{bound.getsockname()[1]}"


def test_another_event_loop_that_is_installed_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """uvicorn takes uvloop where it finds it."""
    (tmp_path / "uvloop").mkdir()
    (tmp_path / "uvloop" / "__init__.py").write_text(
        "def new_event_loop():\n    raise SystemExit('uvloop is used')\n"
    )
    known = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(tmp_path), known))))
    with serve() as url:
        body = {"model": "upper", "messages": [{"role": "user", "content": "loop"}]}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).json()
        assert answer["choices"][0]["message"]["content"] == "LOOP"
