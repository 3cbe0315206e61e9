"""HEAD where GET is served, and what is said of paths that are not."""

import pytest
from helpers_raw_http import connect
from helpers_server import BASE, RunningServer

pytest_plugins = ["helpers_server_fixtures"]
SERVED = ("/", "/v1/models", "/v1/models/upper", "/v1/adapters", "/health", "/metrics", "/version")


@pytest.mark.parametrize("path", [*SERVED, "/v1/models/nobody", "/nothing"])
def test_head_is_get_without_a_body(server: RunningServer, path: str) -> None:
    with_body, without = server.get(path), server.http.head(path)
    assert without.status_code == with_body.status_code
    assert without.content == b""
    kept = [each for each in with_body.headers if each not in ("date", "x-request-id")]
    if path == "/metrics":
        kept.remove("content-length")  # the page grows
    assert {name: without.headers[name] for name in kept} == {
        name: with_body.headers[name] for name in kept
    }


def test_the_connection_goes_on_behind_a_head(server: RunningServer) -> None:
    with connect(server.url) as sock:
        sock.sendall(b"HEAD /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            head += sock.recv(1)
        sock.sendall(b"GET /version HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert sock.recv(2**16).startswith(b"HTTP/1.1 200 ")


def test_head_of_a_route_for_posts_is_405(server: RunningServer) -> None:
    assert server.http.head("/v1/completions").status_code == 405


def test_a_long_path_is_shown_in_part(server: RunningServer) -> None:
    for method, path in (("GET", "/no/" + "x" * 15_000), ("DELETE", "/v1/models/" + "x" * 15_000)):
        message = server.http.request(method, path).json()["error"]["message"]
        assert message.startswith(f"{method} {path[:200]}... is not served: ")
        assert len(message) < 700


def test_an_adapter_of_a_long_name_is_shown_in_part(server: RunningServer) -> None:
    for path in ("/v1/models/", "/v1/adapters/", f"/v1/models/{BASE}:"):
        answer = server.get(path + "x" * 15_000)
        assert answer.status_code == 404
        assert len(answer.text) < 700
