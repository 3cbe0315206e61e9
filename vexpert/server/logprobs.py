"""Log-probabilities in OpenAI's two shapes, and prompt log-probabilities in vLLM's."""

from collections.abc import Sequence
from typing import Any

from vexpert.engine.outputs import Logprob, LogprobRow

FLOOR = -9999.0  # JSON has no -inf; OpenAI's own stand-in


def _value(entry: Logprob) -> float:
    return max(entry.logprob, FLOOR)


def _likeliest(row: LogprobRow, count: int) -> list[Logprob]:
    return sorted((entry for entry in row.values() if entry.rank <= count), key=lambda e: e.rank)


def _bytes(token: str) -> list[int] | None:
    """UTF-8 of a token's text; None for a piece of a character, whose text is not its bytes."""
    return None if "\ufffd" in token else list(token.encode())


def _chat_entry(entry: Logprob) -> dict[str, Any]:
    token = entry.decoded_token
    return {"token": token, "logprob": _value(entry), "bytes": _bytes(token)}


def chat_logprobs(
    token_ids: Sequence[int], rows: Sequence[LogprobRow] | None, count: int
) -> dict[str, Any]:
    """`logprobs` of a chat choice: each token with the `count` likeliest beside it."""
    content = [
        _chat_entry(row[token])
        | {"top_logprobs": [_chat_entry(entry) for entry in _likeliest(row, count)]}
        for token, row in zip(token_ids, rows or [], strict=True)
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(
    token_ids: Sequence[int],
    rows: Sequence[LogprobRow | None],
    texts: Sequence[str],
    count: int,
    offsets: Sequence[int],
) -> dict[str, Any]:
    """`logprobs` of a text choice; `offsets`: where each token's text begins.

    A row is None for the first token of a prompt, which has no log-probability.
    """
    return {
        "tokens": list(texts),
        "token_logprobs": [
            None if row is None else _value(row[token])
            for token, row in zip(token_ids, rows, strict=True)
        ],
        "top_logprobs": [
            None if row is None else _top(row, token, count)
            for token, row in zip(token_ids, rows, strict=True)
        ],
        "text_offset": list(offsets),
    }


def _top(row: LogprobRow, token: int, count: int) -> dict[str, float]:
    """The `count` likeliest tokens and the chosen one, as OpenAI returns them."""
    entries = [*_likeliest(row, count), row[token]]
    return {entry.decoded_token: _value(entry) for entry in entries}


def prompt_logprobs(rows: Sequence[LogprobRow | None]) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: by token id."""
    return [None if row is None else _by_token(row) for row in rows]


def _by_token(row: LogprobRow) -> dict[str, Any]:
    return {
        str(token): {
            "logprob": _value(entry),
            "rank": entry.rank,
            "decoded_token": entry.decoded_token,
        }
        for token, entry in row.items()
    }
