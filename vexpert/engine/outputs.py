"""What the engine hands back, shaped as users of vLLM know it."""

from dataclasses import dataclass, field

from vexpert.errors import AdapterGoneError, RequestError, VexpertError
from vexpert.lora.info import TierUsage


@dataclass(frozen=True)
class Logprob:
    """Log-probability of one token: natural logarithm, and its rank (1 is the likeliest)."""

    logprob: float
    rank: int
    decoded_token: str


LogprobRow = dict[int, Logprob]  # token id -> its log-probability


@dataclass
class CompletionOutput:
    """One of the n completions of a request."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None  # of the chosen tokens; None unless logprobs are asked
    logprobs: list[LogprobRow] | None = None
    finish_reason: str | None = None  # "stop", "length" or "abort"; None: still running
    stop_reason: int | str | None = None  # the stop string or token that ended it; None: eos


@dataclass
class RequestOutput:
    """A request's state after a step. `outputs` hold everything so far, not the last step alone.

    While a request runs, the lists of token ids and logprobs are the engine's own: read them, copy
    what must not grow with the next step, and change nothing.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    adapter: str | None
    prompt_logprobs: list[LogprobRow | None] | None = None  # the first is None
    num_cached_tokens: int = 0  # prompt tokens taken from the prefix cache
    error: str | None = None  # why the engine gave up on this request: its outputs are no answer
    lost_adapter: bool = False  # the error is the adapter's end, not the request's fault

    @property
    def failure(self) -> VexpertError | None:
        """The error to raise; None for an answer."""
        if self.error is None:
            return None
        return AdapterGoneError(self.error) if self.lost_adapter else RequestError(self.error)


@dataclass(frozen=True)
class EngineStats:
    """One look at the engine, for metrics and the periodic line. Counters only grow."""

    num_running: int
    num_waiting: int
    running_adapters: tuple[str, ...]
    waiting_adapters: tuple[str, ...]
    max_loras: int  # slots: most adapters on the device at once
    kv_blocks_total: int
    kv_blocks_used: int
    prompt_tokens: int
    generation_tokens: int
    prefix_hit_tokens: int
    prefix_query_tokens: int
    preemptions: int
    steps: int
    adapters: TierUsage = field(default_factory=TierUsage)
    running_by_adapter: dict[str, int] = field(default_factory=dict)  # completions by name
    waiting_by_adapter: dict[str, int] = field(default_factory=dict)
