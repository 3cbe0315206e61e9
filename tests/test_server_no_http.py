"""What is no HTTP is refused with an error object, or ends an answer; it is nobody's traceback."""

import logging
from typing import Any

import httpx
import pytest
from helpers_raw_http import connect, request_bytes, rest_of
from helpers_server import BASE, make_fake_engine
from helpers_wait import wait_for
from test_server_shutdown import drained, end

CHUNKED = "Host: x\r\nTransfer-Encoding: chunked\r\n\r\n"
NO_CHUNK = b"no chunk\r\n\r\n"
LONG = {"model": BASE, "prompt": "x", "ignore_eos": True, "max_tokens": 200, "stream": True}


def head(line: str) -> bytes:
    return f"{line} HTTP/1.1\r\n{CHUNKED}".encode()


def refusal(answer: bytes) -> dict[str, Any]:
    """The error of a whole answer, after which the connection is closed."""
    lines, _, body = answer.partition(b"\r\n\r\n")
    fields = httpx.Headers([tuple(line.split(b": ", 1)) for line in lines.split(b"\r\n")[1:]])
    assert fields["connection"] == "close"
    assert fields["content-type"] == "application/json"
    assert int(fields["content-length"]) == len(body)
    error: dict[str, Any] = httpx.Response(int(lines.split()[1]), content=body).json()["error"]
    return error


@pytest.fixture(autouse=True)
def nothing_is_raised(caplog: pytest.LogCaptureFixture) -> Any:
    with caplog.at_level(logging.ERROR):
        yield
    assert [each for each in caplog.get_records("call") if each.levelno >= logging.ERROR] == []


@pytest.mark.parametrize(
    ("sent", "status", "reason"),
    [
        (b"\x16\x03\x01\x00\r\n\r\n", 400, "illegal request line"),
        (b"GET /health HTTP/1.1\r\n\r\n", 400, "Host"),
        (b"GET /health HTTP/1.1\r\nHost: x\r\nContent-Length: -3\r\n\r\n", 400, "Content-Length"),
        (
            b"GET /health HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip\r\n\r\n",
            400,
            "Transfer-Encoding",
        ),
        (head("POST /v1/completions") + NO_CHUNK, 400, "illegal chunk header"),
        (b"GET /" + b"x" * 2**15, 431, "too long"),
    ],
)
def test_what_is_no_http_gets_an_error_object(sent: bytes, status: int, reason: str) -> None:
    def work(url: str) -> None:
        with connect(url) as sock:
            sock.sendall(sent)
            answer = rest_of(sock)
        assert answer.startswith(f"HTTP/1.1 {status} ".encode())
        error = refusal(answer)
        assert error["type"] == "invalid_request_error"
        assert "no valid HTTP request" in error["message"]
        assert reason in error["message"]
        end()

    assert drained(make_fake_engine(), 5.0, work) == 0


def test_an_answer_to_head_has_no_body() -> None:
    def work(url: str) -> None:
        with connect(url) as sock:
            sock.sendall(head("HEAD /v1/completions") + NO_CHUNK)
            assert rest_of(sock).endswith(b"\r\n\r\n")
        end()

    assert drained(make_fake_engine(), 5.0, work) == 0


@pytest.mark.parametrize("path", ["/health", "/v1/nothing"])
def test_after_an_answer_the_connection_is_closed(path: str) -> None:
    def work(url: str) -> None:
        with connect(url) as sock:
            sock.sendall(head(f"POST {path}"))
            answer = sock.recv(1 << 16)
            assert answer.startswith(b"HTTP/1.1 40")
            sock.sendall(NO_CHUNK)
            assert rest_of(sock).count(b"HTTP/1.1") == 0
        end()

    assert drained(make_fake_engine(), 5.0, work) == 0


def test_a_stream_ends_where_no_http_comes_behind_it() -> None:
    """It is answered first: what comes behind a request is read once that is done."""

    def work(url: str) -> None:
        with connect(url) as sock:
            sock.sendall(request_bytes(LONG) + b"no request\r\n\r\n")
            answer = rest_of(sock)
        stream, _, behind = answer.partition(b"data: [DONE]\n\n")
        assert stream.startswith(b"HTTP/1.1 200 ")
        assert refusal(behind[behind.index(b"HTTP/1.1 ") :])["message"]
        end()

    assert drained(make_fake_engine(), 5.0, work) == 0


def test_half_a_request_ends_with_its_parser() -> None:
    """Its task is not left to wait for a body that nobody reads."""
    engine = make_fake_engine()

    def work(url: str) -> None:
        with connect(url) as sock:
            sock.sendall(head("POST /v1/completions") + b"1\r\n{\r\n")
            sock.sendall(NO_CHUNK)
            assert refusal(rest_of(sock))["message"]
        with httpx.Client(base_url=url, timeout=60) as client:
            wait_for(lambda: client.get("/health").status_code == 200)
        end()

    assert drained(engine, 60.0, work) == 0
    assert not engine.requests
