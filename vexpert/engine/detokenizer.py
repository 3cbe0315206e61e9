"""Token ids to text, one token at a time, never splitting a character."""

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

MAX_HELD = 3  # a character of UTF-8 has at most 4 bytes: 3 may be there before it is complete
WINDOW = 16  # tokens decoded at once, before the window moves on
REPLACEMENT = "\ufffd"
# A U+FFFD that the model wrote, at the end of tokens: plain, as bytes, and as bytes by name.
WRITTEN = (REPLACEMENT, "\u00ef\u00bf\u00bd", "<0xEF><0xBF><0xBD>")


class Decoder(Protocol):
    """What makes text of tokens."""

    def decode(self, token_ids: list[int], **options: Any) -> Any: ...


class Tokenizer(Decoder, Protocol):
    """What the engine uses of a transformers tokenizer."""

    def encode(self, text: str, **options: Any) -> list[int]: ...

    def decode(self, token_ids: list[int], **options: Any) -> str: ...


# Where transformers defines a decode that only calls the compiled tokenizer.
PLAIN = {
    "decode": "transformers.tokenization_utils_base",
    "_decode": "transformers.tokenization_utils_tokenizers",
}


def find_decode(tokenizer: Decoder, skip_special_tokens: bool) -> Callable[[list[int]], str]:
    """`tokenizer.decode`, without the Python around the compiled one if that adds nothing.

    What surrounds it takes longer than the work itself.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    methods = {name: getattr(type(tokenizer), name, None) for name in PLAIN}
    is_plain = backend is not None and all(
        getattr(method, "__module__", None) == PLAIN[name] for name, method in methods.items()
    )
    if is_plain and not getattr(tokenizer, "clean_up_tokenization_spaces", True):
        assert backend is not None
        return partial(backend.decode, skip_special_tokens=skip_special_tokens)
    return partial(tokenizer.decode, skip_special_tokens=skip_special_tokens)


class Detokenizer:
    """Decodes a short window of the newest tokens, so a token costs the same at any length.

    Bytes of a character that is not complete decode to U+FFFD. Up to `MAX_HELD` of these at the
    end of the text are held back until tokens follow; at the end of a sequence they are dropped.
    One that the model wrote itself is a character as any other.
    """

    def __init__(self, tokenizer: Decoder, skip_special_tokens: bool) -> None:
        self._decode = find_decode(tokenizer, skip_special_tokens)
        self._pieces_of = getattr(tokenizer, "convert_ids_to_tokens", None)
        self._window: list[int] = []
        self._emitted = 0  # characters of the window's text that have been handed out
        self._border = 0  # tokens of the window up to the last border of a character

    def append(self, token: int) -> str:
        """Text that `token` completes; may be empty."""
        self._window.append(token)
        text = self._decode(self._window)
        end = len(text)
        most_held = self._most_held(text)
        while end > self._emitted and len(text) - end < most_held and text[end - 1] == REPLACEMENT:
            end -= 1
        new = text[self._emitted : end]
        self._emitted = max(self._emitted, end)
        if len(self._window) > WINDOW:
            self._move(complete=end == len(text))
        elif end == len(text):
            self._border = len(self._window)
        return new

    def _most_held(self, text: str) -> int:
        """Characters at the end of the window's text that may become others yet.

        Where a byte has a token of its own, some tokenizers decode a run of them as a whole: half a
        character behind others makes U+FFFD of them all.
        """
        if text[-1:] != REPLACEMENT or self._is_written():
            return 0
        is_new = len(self._window) - self._border <= MAX_HELD
        return len(text) if is_new else MAX_HELD

    def _is_written(self) -> bool:
        """Whether the window ends with a whole U+FFFD."""
        if self._pieces_of is None:
            return False
        pieces = self._pieces_of(self._window[-MAX_HELD:])
        return "".join(map(str, pieces)).endswith(WRITTEN)

    def _move(self, complete: bool) -> None:
        """Start the window at the last border before this token.

        Some tokenizers decode a first token in its own way, so one token already handed out stays
        in front. Text that never completes a character moves the window too, after a while.
        """
        if not complete and len(self._window) <= 2 * WINDOW:
            return
        del self._window[: self._border if 0 < self._border < len(self._window) else -MAX_HELD - 1]
        self._border = len(self._window) if complete else 0
        text = self._decode(self._window)
        held = 0
        while not complete and held < min(MAX_HELD, len(text)) and text[-held - 1] == REPLACEMENT:
            held += 1
        self._emitted = len(text) - held
