"""One request's way from the engine thread to its client: what is new since the last update."""

from collections.abc import Callable
from dataclasses import dataclass, field

from vexpert.engine.outputs import CompletionOutput, LogprobRow, RequestOutput
from vexpert.errors import RequestError


class EngineFailedError(RuntimeError):
    """The engine stopped on an error of its own; no request can be answered any more."""


class ShuttingDownError(RuntimeError):
    """The server ends: it takes no new requests, or cuts those that run at its deadline."""


class OverloadedError(RuntimeError):
    """As many requests wait as may."""


class RequestTimeoutError(RuntimeError):
    """A request has taken longer than the server allows."""

    def __init__(self, seconds: float | None) -> None:
        super().__init__(f"the answer was not complete after {seconds} seconds; ask for less")


@dataclass(frozen=True)
class Delta:
    """What one completion gained since the last update."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[LogprobRow] | None
    finish_reason: str | None
    stop_reason: int | str | None


@dataclass(frozen=True)
class Update:
    """What one request gained since the last update."""

    deltas: list[Delta]
    finished: bool
    num_cached_tokens: int
    prompt_logprobs: list[LogprobRow | None] | None


Failure = EngineFailedError | ShuttingDownError | RequestError  # of all requests, or of one
Sink = Callable[[Update | Failure], None]


@dataclass
class _Cursor:
    text: int = 0
    tokens: int = 0
    finished: bool = False


@dataclass
class Tracker:
    """The engine thread's record of one request; `every_step` False: one update, at the end."""

    request_id: str
    adapter: str | None
    num_prompt_tokens: int
    every_step: bool
    sink: Sink
    num_sequences: int
    arrival: float  # seconds, perf_counter
    last_token: float | None = None  # seconds, perf_counter; None before the first token
    num_tokens: int = 0  # generated, over all n completions
    cursors: dict[int, _Cursor] = field(default_factory=dict)

    def count(self, output: RequestOutput) -> int:
        """Tokens generated since the last count."""
        total = sum(len(completion.token_ids) for completion in output.outputs)
        new, self.num_tokens = total - self.num_tokens, total
        return new

    def update(self, output: RequestOutput) -> Update | None:
        """What is new in `output`, copied, so that later steps do not change it; None: nothing."""
        if not (self.every_step or output.finished):
            return None
        deltas = [delta for part in output.outputs if (delta := self._delta(part))]
        if not deltas and not output.finished:
            return None
        return Update(deltas, output.finished, output.num_cached_tokens, output.prompt_logprobs)

    def _delta(self, part: CompletionOutput) -> Delta | None:
        cursor = self.cursors.setdefault(part.index, _Cursor())
        if cursor.finished:
            return None
        text, tokens = part.text[cursor.text :], part.token_ids[cursor.tokens :]
        rows = None if part.logprobs is None else part.logprobs[cursor.tokens :]
        cursor.finished = part.finish_reason is not None
        if not (text or tokens or cursor.finished):
            return None
        cursor.text, cursor.tokens = len(part.text), len(part.token_ids)
        return Delta(part.index, text, tokens, rows, part.finish_reason, part.stop_reason)
