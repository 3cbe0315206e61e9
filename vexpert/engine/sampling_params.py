"""Sampling options of one request, with the names users of vLLM know."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from vexpert.config import shown
from vexpert.engine.structured_outputs import StructuredOutputs
from vexpert.errors import RequestError

MAX_STOPS = 64  # each is looked for at every token
MAX_STOP_CHARACTERS = 1000
MAX_STOP_TOKENS = 1024
MAX_BIASES = 1024  # added at every token, row by row


def _require(condition: bool, param: str, value: object, rule: str) -> None:
    if not condition:
        raise RequestError(f"{param}={shown(value)}: {rule}", param)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


class _Range(NamedTuple):
    """What a number may be."""

    low: float
    high: float
    is_int: bool = False
    may_be_none: bool = False

    def check(self, name: str, value: Any) -> None:
        if value is None and self.may_be_none:
            return
        kind = "an integer" if self.is_int else "a number"
        rule = f"use {kind} from {self.low} to {self.high}"
        is_kind = _is_int(value) if self.is_int else _is_number(value)
        ok = is_kind and self.low <= value <= self.high
        _require(ok, name, value, f"{rule}, or None" if self.may_be_none else rule)


LARGEST = 2**31 - 1
_NUMBERS = {
    "n": _Range(1, 128, True),
    "temperature": _Range(0.0, 100.0),
    "top_p": _Range(0.0, 1.0),
    "top_k": _Range(-1, LARGEST, True),
    "min_p": _Range(0.0, 1.0),
    "repetition_penalty": _Range(0.01, 100.0),
    "presence_penalty": _Range(-2.0, 2.0),
    "frequency_penalty": _Range(-2.0, 2.0),
    "seed": _Range(-(2**63), 2**64 - 1, True, True),
    "max_tokens": _Range(1, LARGEST, True, True),
    "min_tokens": _Range(0, LARGEST, True),
    "logprobs": _Range(-1, LARGEST, True, True),  # -1: the whole vocabulary
    "prompt_logprobs": _Range(-1, LARGEST, True, True),
}


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens, when to stop, and what to report. Bad values raise RequestError.

    temperature 0 is greedy; top_k 0 or -1 is off. `logprobs=n` reports the n likeliest tokens and
    the chosen one, of the log-softmax before temperature and penalties; -1 is the whole vocabulary.
    `prompt_logprobs` is the same for each prompt token after the first. Completion i of n uses
    seed + i. `structured_outputs`, also as a dict of its fields, constrains the text; it needs
    xgrammar.
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
    structured_outputs: StructuredOutputs | dict[str, Any] | None = None

    def __post_init__(self) -> None:
        for name, rule in _NUMBERS.items():
            rule.check(name, getattr(self, name))
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            value = getattr(self, name)
            _require(isinstance(value, bool), name, value, "use True or False")
        _require(self.top_p > 0.0, "top_p", self.top_p, "must be above 0")
        most = self.max_tokens
        in_order = most is None or self.min_tokens <= most
        _require(in_order, "min_tokens", self.min_tokens, f"must not exceed max_tokens={most}")
        self._check_stops()
        self._check_bias()
        self._check_structured_outputs()

    def _check_stops(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        is_list = isinstance(stop, list | tuple) and all(isinstance(text, str) for text in stop)
        _require(is_list, "stop", stop, "use a string or a list of strings")
        count = len(stop)
        _require(count <= MAX_STOPS, "stop", count, f"use at most {MAX_STOPS} strings")
        _require(all(stop), "stop", stop, "a stop string must not be empty")
        longest = max(map(len, stop), default=0)
        rule = f"a stop string has at most {MAX_STOP_CHARACTERS} characters"
        _require(longest <= MAX_STOP_CHARACTERS, "stop", longest, rule)
        tokens = self.stop_token_ids
        is_list = isinstance(tokens, list | tuple) and all(map(_is_int, tokens))
        _require(is_list, "stop_token_ids", tokens, "use a list of integers")
        rule = f"use at most {MAX_STOP_TOKENS} tokens"
        _require(len(tokens) <= MAX_STOP_TOKENS, "stop_token_ids", len(tokens), rule)
        object.__setattr__(self, "stop", tuple(stop))
        object.__setattr__(self, "stop_token_ids", tuple(tokens))

    def _check_bias(self) -> None:
        biases = self.logit_bias
        _require(isinstance(biases, dict), "logit_bias", biases, "use a dict, {token id: bias}")
        rule = f"use at most {MAX_BIASES} tokens"
        _require(len(biases) <= MAX_BIASES, "logit_bias", len(biases), rule)
        for token, bias in biases.items():
            _require(_is_int(token), "logit_bias", {token: bias}, "keys are token ids, integers")
            in_range = _is_number(bias) and -100.0 <= bias <= 100.0
            _require(in_range, "logit_bias", {token: bias}, "use a number from -100 to 100")
        object.__setattr__(self, "logit_bias", dict(biases))

    def _check_structured_outputs(self) -> None:
        wanted = self.structured_outputs
        name = "structured_outputs"
        if isinstance(wanted, dict):
            try:
                wanted = StructuredOutputs(**wanted)
            except TypeError as error:
                raise RequestError(f"{name}: {str(error).rpartition('() ')[2]}", name) from error
            object.__setattr__(self, name, wanted)
        is_kind = wanted is None or isinstance(wanted, StructuredOutputs)
        _require(is_kind, name, wanted, "use StructuredOutputs, a dict of its fields, or None")
        free = wanted is None or not self.ignore_eos
        _require(free, "ignore_eos", True, "the end of a structured output cannot be ignored")

    @property
    def constraint(self) -> StructuredOutputs | None:
        """`structured_outputs`, whatever it was given as."""
        assert not isinstance(self.structured_outputs, dict)
        return self.structured_outputs

    @property
    def is_greedy(self) -> bool:
        return self.temperature < 1e-5
