"""The text of one sequence: where a stop string ends it, and what may be shown meanwhile."""

from vexpert.engine.sampling_params import SamplingParams


class OutputText:
    """Collects text and looks for stop strings in it, across the borders of tokens."""

    def __init__(self, params: SamplingParams) -> None:
        self.text = ""
        self._stops = tuple(params.stop)
        self._keeps_stop = params.include_stop_str_in_output
        self._longest = max((len(stop) for stop in self._stops), default=0)

    def append(self, new: str, look_for_stops: bool) -> str | None:
        """Add `new`; the stop string that ends the text, which is then cut, or None.

        The one that ends first wins. `look_for_stops=False`: min_tokens is not reached, and
        stop strings that end in `new` do not count.
        """
        before = len(self.text)
        self.text += new
        if not (self._stops and new and look_for_stops):
            return None
        found = [(end, stop) for stop in self._stops if (end := self._find(stop, before)) >= 0]
        if not found:
            return None
        end, stop = min(found, key=lambda match: (match[0], -len(match[1])))
        self.text = self.text[: end if self._keeps_stop else end - len(stop)]
        return stop

    def _find(self, stop: str, before: int) -> int:
        """End of the first `stop` that ends after position `before`, or -1."""
        start = self.text.find(stop, max(0, before - len(stop) + 1))
        return start + len(stop) if start >= 0 else -1

    def visible(self) -> str:
        """Text that no stop string can still take back; all of it once the sequence has ended."""
        if self._keeps_stop or not self._stops:
            return self.text
        for held in range(min(self._longest - 1, len(self.text)), 0, -1):
            tail = self.text[-held:]
            if any(stop.startswith(tail) for stop in self._stops if len(stop) > held):
                return self.text[:-held]
        return self.text
