"""Fields that chat and text completions share, and the SamplingParams they become."""

from typing import Annotated, Any

from pydantic import Field

from vexpert.engine.sampling_params import SamplingParams
from vexpert.engine.structured_outputs import StructuredOutputs
from vexpert.errors import RequestError
from vexpert.server.protocol.fields import (
    Count,
    Int64,
    ListOf,
    Positive,
    StrictModel,
    TopCount,
    at_most,
    first_wrong,
    only,
)

PASSED_ON = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "min_tokens",
    "prompt_logprobs",
    "skip_special_tokens",
)


GUIDED = ("json", "regex", "choice", "grammar")


MAX_CHOICES = 32768  # with what stands between them, no more fit into a grammar
Choices = Annotated[ListOf[str], at_most(MAX_CHOICES)]


class StructuredFields(StrictModel):
    """vLLM's `structured_outputs`: one kind of constraint on the text of the answer."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    disable_any_whitespace: bool | None = None


class StreamOptions(StrictModel):
    """Options of a streamed answer."""

    include_usage: bool | None = None
    include_obfuscation: Annotated[Any, only("padding of chunks is not offered", False)] = None


class SamplingFields(StrictModel):
    """Fields of both kinds of completion; null means: the default."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None  # a label for the caller's own use

    n: Positive | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: Int64 | None = None
    stop: str | ListOf[str] | None = None
    logit_bias: Annotated[dict[str, float] | None, first_wrong(int, float)] = None
    max_tokens: Count | None = None

    # vLLM's additions
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: ListOf[Count] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: Count | None = None
    prompt_logprobs: TopCount | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    structured_outputs: StructuredFields | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None

    def check_stream_fields(self) -> None:
        """Raise RequestError for fields that contradict `stream`."""
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options: only with stream=true", "stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise RequestError("prompt_logprobs: only without stream", "prompt_logprobs")

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def constraints(self) -> list[StructuredOutputs]:
        """What the fields constrain the text to. Raises RequestError for a malformed one."""
        fields = self.structured_outputs
        found = []
        if fields is not None:
            given = fields.model_dump(by_alias=True, exclude_none=True)
            found.append(StructuredOutputs(**given))
        for kind in GUIDED:
            value = getattr(self, f"guided_{kind}")
            if value is not None:
                options: dict[str, Any] = {kind: value, "param": f"guided_{kind}"}
                found.append(StructuredOutputs(**options))
        return found

    def constraint(self) -> StructuredOutputs | None:
        """The one of them. Raises RequestError if there are several."""
        found = self.constraints()
        if len(found) > 1:
            first, second = found[0].param, found[1].param
            raise RequestError(f"{second}: contradicts {first}; send one of them", second)
        return found[0] if found else None

    def build_params(
        self, defaults: dict[str, Any], vocab_size: int, **overrides: Any
    ) -> SamplingParams:
        """SamplingParams: the model's `defaults`, then the request, then `overrides`."""
        given = {name: getattr(self, name) for name in PASSED_ON}
        given = {name: value for name, value in given.items() if value is not None}
        bias = token_biases(self.logit_bias or {}, vocab_size)
        return SamplingParams(**{**defaults, **given, "logit_bias": bias, **overrides})


def token_biases(biases: dict[str, float], vocab_size: int) -> dict[int, float]:
    """logit_bias with integer keys. RequestError for a key that is no token id, or one's second."""
    spelled: dict[int, str] = {}
    for key in biases:
        if not (key.isascii() and key.isdigit() and len(key) < 10 and int(key) < vocab_size):
            rule = f"keys are token ids from 0 to {vocab_size - 1}"
            raise RequestError(f"logit_bias={key[:20]!r}: {rule}", "logit_bias")
        other = spelled.setdefault(int(key), key)
        if other != key:
            message = f"logit_bias: {other!r} and {key!r} are one token; send it once"
            raise RequestError(message, "logit_bias")
    return {token: biases[key] for token, key in spelled.items()}
