"""What each token of a tokenizer writes, in bytes, as the grammar compiler needs to know it."""

from typing import Any

from vexpert.errors import UnsupportedError

# Characters that every JSON document of some size needs.
JSON_CHARACTERS = '{}[]":,0123456789'


def token_bytes(tokenizer: Any, vocab_size: int) -> list[bytes]:
    """The bytes of each token, [vocab_size]; empty for those that write no text.

    Special tokens write no text: a grammar must never choose one but the end. Raises
    UnsupportedError for a tokenizer that does not tell its vocabulary.
    """
    from xgrammar import TokenizerInfo

    try:
        # The stop token has no part in this; without one, xgrammar guesses and warns.
        known = TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size, stop_token_ids=[0])
        pieces = list(known.decoded_vocab)
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        message = f"this tokenizer does not tell what its tokens write: {error}"
        raise UnsupportedError(message) from error
    for token in _special_tokens(tokenizer):
        if token < len(pieces):
            pieces[token] = b""
    return pieces


def _special_tokens(tokenizer: Any) -> set[int]:
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special = {token for token, entry in added.items() if getattr(entry, "special", False)}
    return special | set(getattr(tokenizer, "all_special_ids", ()))


def with_special_tokens(pieces: list[bytes], tokenizer: Any, eos: tuple[int, ...]) -> list[bytes]:
    """`pieces` of `token_bytes`, the special tokens as the text they stand for, but the ends."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    told = {token: str(entry) for token, entry in added.items() if token not in eos}
    return [piece or told.get(token, "").encode() for token, piece in enumerate(pieces)]


def unwritable(pieces: list[bytes], characters: str) -> str | None:
    """The first of `characters` whose bytes no token holds, or None."""
    held = set().union(*map(set, pieces))
    return next((c for c in characters if not set(c.encode()) <= held), None)
