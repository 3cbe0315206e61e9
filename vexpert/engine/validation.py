"""What a request must satisfy before it is accepted."""

import operator
from collections.abc import Iterable

from vexpert.engine.sampling_params import SamplingParams
from vexpert.errors import RequestError


def check_prompt(token_ids: Iterable[int], vocab_size: int, max_model_len: int) -> list[int]:
    """The prompt as a new list of ints; RequestError if it cannot run."""
    try:
        tokens = [operator.index(token) for token in token_ids]
    except TypeError as error:
        raise RequestError(f"prompt_token_ids must be integers: {error}", "prompt") from error
    if not tokens:
        raise RequestError("the prompt is empty: give at least one token", "prompt")
    bad = next((token for token in tokens if not 0 <= token < vocab_size), None)
    if bad is not None:
        raise RequestError(
            f"prompt token id {bad} is out of range: use 0 to {vocab_size - 1}", "prompt"
        )
    if len(tokens) >= max_model_len:
        raise RequestError(
            f"the prompt has {len(tokens)} tokens, but max_model_len={max_model_len} counts prompt"
            f" and output together: shorten the prompt to at most {max_model_len - 1} tokens",
            "prompt",
        )
    return tokens


def check_params(params: SamplingParams, vocab_size: int) -> None:
    """RequestError if an option names what this model does not have."""
    for name in ("logprobs", "prompt_logprobs"):
        value = getattr(params, name)
        if value is not None and value > vocab_size:
            raise RequestError(f"{name}={value}: the vocabulary has {vocab_size} tokens", name)
    for name in ("logit_bias", "stop_token_ids"):
        for token in getattr(params, name):
            if not 0 <= token < vocab_size:
                raise RequestError(f"{name} names token {token}: use 0 to {vocab_size - 1}", name)
