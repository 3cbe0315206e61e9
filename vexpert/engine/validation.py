"""What a request must satisfy before it is accepted."""

import operator
from collections.abc import Iterable, Mapping
from typing import Any

from vexpert.config import shown
from vexpert.engine.sampling_params import SamplingParams
from vexpert.errors import RequestError


def check_list(name: str, values: Any) -> list[Any]:
    """`values` as a new list; RequestError if it is no sequence."""
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        raise RequestError(f"{name}={shown(values)}: give a list", name)
    return list(values)


def check_text(name: str, text: Any) -> str:
    """`text` if a tokenizer can take it; RequestError if it is no string of Unicode."""
    if not isinstance(text, str):
        raise RequestError(f"{name}={shown(text)}: give a string", name)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"{name}: not valid Unicode text: {error.reason}", name) from error
    return text


def check_conversation(messages: Any) -> list[dict[str, Any]]:
    """Messages that have a role and content; RequestError names what is missing."""
    conversation = check_list("messages", messages)
    if not conversation:
        raise RequestError("messages: the conversation is empty; give one message", "messages")
    for message in conversation:
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            rule = "give {'role': ..., 'content': ...}"
            raise RequestError(f"messages: {shown(message)}: {rule}", "messages")
        check_text("role", message["role"])
        if message["content"] is None or not isinstance(message["content"], str | list):
            rule = "content is a string, or a list of parts"
            raise RequestError(f"messages: {shown(message)}: {rule}", "messages")
    return conversation


def check_prompt(token_ids: Iterable[int], vocab_size: int, max_model_len: int) -> list[int]:
    """The prompt as a new list of ints; RequestError if it cannot run."""
    try:
        tokens = [_token(token) for token in token_ids]
    except TypeError as error:
        raise RequestError(f"prompt_token_ids must be integers: {error}", "prompt") from error
    if not tokens:
        raise RequestError("the prompt is empty: give at least one token", "prompt")
    bad = next((token for token in tokens if not 0 <= token < vocab_size), None)
    if bad is not None:
        raise RequestError(
            f"prompt token id {shown(bad)} is out of range: use 0 to {vocab_size - 1}", "prompt"
        )
    if len(tokens) >= max_model_len:
        raise RequestError(
            f"the prompt has {len(tokens)} tokens, but max_model_len={max_model_len} counts prompt"
            f" and output together: shorten the prompt to at most {max_model_len - 1} tokens",
            "prompt",
        )
    return tokens


def _token(token: Any) -> int:
    if isinstance(token, bool):
        raise TypeError(f"{token} is a bool")
    return operator.index(token)


def check_params(params: SamplingParams, vocab_size: int) -> None:
    """RequestError if an option names what this model does not have."""
    for name in ("logprobs", "prompt_logprobs"):
        value = getattr(params, name)
        if value is not None and value > vocab_size:
            raise RequestError(f"{name}={value}: the vocabulary has {vocab_size} tokens", name)
    for name in ("logit_bias", "stop_token_ids"):
        for token in getattr(params, name):
            if not 0 <= token < vocab_size:
                rule = f"use 0 to {vocab_size - 1}"
                raise RequestError(f"{name} names token {shown(token)}: {rule}", name)
