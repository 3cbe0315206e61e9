"""Sampling options of one request, with the names users of vLLM know."""

import math
from dataclasses import dataclass, field

from vexpert.errors import RequestError


def _require(condition: bool, param: str, value: object, rule: str) -> None:
    if not condition:
        raise RequestError(f"{param}={value!r}: {rule}", param)


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens, when to stop, and what to report. Bad values raise RequestError.

    temperature 0 is greedy; top_k 0 or -1 is off. `logprobs=n` reports the n likeliest tokens and
    the chosen one, of the log-softmax before temperature and penalties; -1 is the whole vocabulary.
    `prompt_logprobs` is the same for each prompt token after the first. Completion i of n uses
    seed + i.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] | list[str] | str = ()
    stop_token_ids: tuple[int, ...] | list[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logit_bias: dict[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        self._check_numbers()
        _require(1 <= self.n <= 128, "n", self.n, "use 1 to 128")
        _require(
            self.max_tokens is None or self.max_tokens >= 1,
            "max_tokens",
            self.max_tokens,
            "must be at least 1, or None for as many as fit",
        )
        _require(self.min_tokens >= 0, "min_tokens", self.min_tokens, "must not be negative")
        _require(
            self.max_tokens is None or self.min_tokens <= self.max_tokens,
            "min_tokens",
            self.min_tokens,
            f"must not exceed max_tokens={self.max_tokens}",
        )
        _require(all(self.stop), "stop", self.stop, "a stop string must not be empty")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            rule = "use a count, -1 for the whole vocabulary, or None"
            _require(value is None or value >= -1, name, value, rule)
        seed_ok = self.seed is None or -(2**63) <= self.seed < 2**64
        _require(seed_ok, "seed", self.seed, "use an integer of 64 bits, or None")
        for token, bias in self.logit_bias.items():
            _require(-100.0 <= bias <= 100.0, "logit_bias", {token: bias}, "use -100 to 100")

    def _check_numbers(self) -> None:
        rules = {
            "temperature": (0.0, 100.0),
            "top_p": (0.0, 1.0),
            "min_p": (0.0, 1.0),
            "presence_penalty": (-2.0, 2.0),
            "frequency_penalty": (-2.0, 2.0),
            "repetition_penalty": (0.0, 100.0),
        }
        for name, (low, high) in rules.items():
            value = getattr(self, name)
            ok = math.isfinite(value) and low <= value <= high
            _require(ok, name, value, f"use a number from {low:g} to {high:g}")
        _require(self.top_p > 0.0, "top_p", self.top_p, "must be above 0")
        _require(
            self.repetition_penalty > 0.0,
            "repetition_penalty",
            self.repetition_penalty,
            "must be above 0; 1 is off",
        )
        _require(self.top_k >= -1, "top_k", self.top_k, "use 0 or -1 for off, or a positive count")

    @property
    def is_greedy(self) -> bool:
        return self.temperature < 1e-5
