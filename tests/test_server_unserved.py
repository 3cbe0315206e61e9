"""What the openai client, or another server's client, asks for and is not served."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from helpers_server import RunningServer, make_fake_engine, serving

CALL = re.compile(
    r"self\._(get|post|delete|put|patch|get_api_list)\(\s*(?:path_template\(\s*)?f?\"(/[^\"]*)\""
)
SERVED = {
    ("GET", "/models"),
    ("GET", "/models/{model}"),
    ("POST", "/chat/completions"),
    ("POST", "/completions"),
}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with serving(make_fake_engine()) as running:
        yield running


def client_calls() -> list[tuple[str, str]]:
    """(method, path) of every call that the installed openai client can make."""
    folder = Path(openai.__file__).parent / "resources"
    found = set()
    for file in folder.rglob("*.py"):
        for method, path in CALL.findall(file.read_text()):
            found.add(("GET" if method == "get_api_list" else method.upper(), path))
    return sorted(found - SERVED)


def test_calls_are_found() -> None:
    calls = client_calls()
    assert len(calls) > 100
    assert {("POST", "/responses"), ("POST", "/embeddings")} < set(calls)


def test_each_other_call_of_the_client_is_refused_with_a_remedy(server: RunningServer) -> None:
    for method, path in client_calls():
        address = "/v1" + re.sub(r"\{\w+\}", "x", path)
        response = server.http.request(method, address)
        assert response.status_code in (404, 405), (method, path)
        error = response.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert error["message"].startswith(f"{method} {address.partition('?')[0]} is not served: ")
        if response.status_code == 404:
            assert error["code"] == "not_served"


@pytest.mark.parametrize(
    ("method", "path", "remedy"),
    [
        ("POST", "/v1/responses", "use /v1/chat/completions"),
        ("POST", "/v1/embeddings", "write text"),
        ("GET", "/v1/chat/completions/x", "nothing is stored"),
        ("POST", "/v1/fine_tuning/jobs", "/v1/load_lora_adapter"),
        ("POST", "/chat/completions", "use /v1/chat/completions; a client's base_url ends"),
        ("POST", "/v1/v1/chat/completions", "use /v1/chat/completions; a client's base_url ends"),
        ("POST", "/load_lora_adapter", "use /v1/load_lora_adapter"),
        ("POST", "/generate", "use /v1/completions"),
        ("GET", "/nothing", "/openapi.json"),
        ("GET", "/v1/chat/completions", "takes POST"),
        ("DELETE", "/v1/models/upper", "takes GET"),
    ],
)
def test_the_remedy(server: RunningServer, method: str, path: str, remedy: str) -> None:
    response = server.http.request(method, path)
    assert response.status_code in (404, 405)
    assert remedy in response.json()["error"]["message"]
    if response.status_code == 405:
        assert remedy.split()[-1] in response.headers["Allow"]


def test_the_clients_error_has_the_remedy(server: RunningServer) -> None:
    with server.client() as client:
        with pytest.raises(openai.NotFoundError, match=r"chat\.completions"):
            client.responses.create(model="x", input="hello")
        inputs: Any = "hello"
        with pytest.raises(openai.NotFoundError, match="write text"):
            client.embeddings.create(model="x", input=inputs)
