"""One request's way from the engine to its client, on the server's side."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from vexpert.engine.outputs import LogprobRow
from vexpert.errors import AdapterGoneError, RequestError

OBJECT_BYTES = 256  # of a token, or a log-probability, with what it is kept in; measured


class EngineFailedError(RuntimeError):
    """The engine has ended, or failed; no request can be answered unless it starts again."""


class EngineCallError(RuntimeError):
    """One call met an error of the engine that no user can cause; the engine goes on."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind  # the error's class in the engine


class ShuttingDownError(RuntimeError):
    """The server ends: it takes no new requests, or cuts those that run at its deadline."""


class OverloadedError(RuntimeError):
    """As many requests wait as may."""


class RequestTimeoutError(RuntimeError):
    """A request has taken longer than the server allows."""

    def __init__(self, seconds: float | None) -> None:
        super().__init__(f"the answer was not complete after {seconds} seconds; ask for less")


class SlowReaderError(RuntimeError):
    """A client reads its stream so slowly that too much of it would have to be kept."""


class Delta(NamedTuple):
    """What one completion gained since the last update."""

    index: int  # type: ignore[assignment]  # a tuple's method of that name is not needed
    text: str
    token_ids: list[int]
    logprobs: list[LogprobRow] | None
    finish_reason: str | None
    stop_reason: int | str | None


class Update(NamedTuple):
    """What one request gained since the last update."""

    deltas: list[Delta]
    finished: bool
    num_cached_tokens: int
    prompt_logprobs: tuple[LogprobRow | None, ...] | None

    def size(self) -> int:
        """Bytes that it takes in memory, roughly."""
        objects = 0
        for delta in self.deltas:
            objects += 1 + len(delta.token_ids)
            if delta.logprobs:
                objects += sum(1 + len(row) for row in delta.logprobs)
        return OBJECT_BYTES * objects


Failure = (  # of all requests, or of one
    EngineFailedError
    | ShuttingDownError
    | RequestTimeoutError
    | SlowReaderError
    | RequestError
    | AdapterGoneError
)
Sink = Callable[[Update | Failure], Any]


@dataclass
class Tracker:
    """The server's record of one request that runs."""

    request_id: str
    adapter: str | None
    num_prompt_tokens: int
    num_sequences: int
    sink: Sink
    arrival: float  # seconds, perf_counter
    last_token: float | None = None  # seconds, perf_counter; None before the first token
    prompt_logprobs: tuple[LogprobRow | None, ...] | None = None  # all updates share it
    num_cached_tokens: int = 0  # as of the last update that told it
    reasons: list[str] = field(default_factory=list)  # of the completions that have ended

    def all_reasons(self) -> list[str]:
        """One for each completion; those that have not ended were aborted."""
        return self.reasons + ["abort"] * (self.num_sequences - len(self.reasons))
