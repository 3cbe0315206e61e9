"""Where tokens begin in a text, told as they come."""

from collections.abc import Iterable

from vexpert.engine.detokenizer import Detokenizer


class Places:
    """Of tokens in the text that `detokenizer` makes of them, which begins at `start`.

    A token that is hidden takes no place, and all pieces of a character begin where it does.
    """

    def __init__(self, detokenizer: Detokenizer, start: int = 0) -> None:
        self._detokenizer = detokenizer
        self._place = start

    def append(self, tokens: Iterable[int]) -> list[int]:
        """Where each of the next tokens begins."""
        found = []
        for token in tokens:
            found.append(self._place)
            self._place += len(self._detokenizer.append(token))
        return found
