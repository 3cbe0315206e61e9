"""Counts of what requests do. One writer, the engine thread; the metrics page reads beside it."""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field

from vexpert.server.adapter_labels import AdapterLabels
from vexpert.server.progress import Tracker

# Bucket bounds in seconds.
FIRST_TOKEN = (0.005, 0.01, 0.02, 0.04, 0.08, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 80.0)
BETWEEN_TOKENS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.75, 1.0, 2.5, 5.0, 10.0)
WHOLE_REQUEST = (0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 240.0, 960.0)


class Histogram:
    """Seconds in buckets. An observation costs one bisection: it sits in the decode loop."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)  # the last one: above every bound
        self.total = 0.0

    def observe(self, seconds: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, seconds)] += times
        self.total += seconds * times

    def cumulative(self) -> list[tuple[str, int]]:
        """Prometheus buckets: (upper bound, observations at most that long)."""
        buckets, seen = [], 0
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            seen += count
            buckets.append(("+Inf" if bound == float("inf") else str(bound), seen))
        return buckets


@dataclass
class Recorder:
    """What the engine thread counts. Adapters go by their label; "" is the base model."""

    labels: AdapterLabels = field(default_factory=AdapterLabels)

    first_token: Histogram = field(default_factory=lambda: Histogram(FIRST_TOKEN))
    between_tokens: Histogram = field(default_factory=lambda: Histogram(BETWEEN_TOKENS))
    whole_request: Histogram = field(default_factory=lambda: Histogram(WHOLE_REQUEST))
    ended: Counter[str] = field(default_factory=Counter)  # completions by finish reason
    requests: Counter[tuple[str, str]] = field(default_factory=Counter)  # the same by adapter too
    prompt_tokens: Counter[str] = field(default_factory=Counter)
    generation_tokens: Counter[str] = field(default_factory=Counter)
    first_tokens: Counter[str] = field(default_factory=Counter)  # requests that got one
    first_token_seconds: defaultdict[str, float] = field(  # their waits together
        default_factory=lambda: defaultdict(float)
    )

    def stepped(self, tracker: Tracker, new_tokens: int, now: float) -> None:
        """A request gained `new_tokens` tokens over its n completions at `now`, perf_counter."""
        if new_tokens == 0:
            return
        label = self.labels.of(tracker.adapter)
        if tracker.last_token is None:
            self.first_token.observe(now - tracker.arrival)
            self.first_tokens[label] += 1
            self.prompt_tokens[label] += tracker.num_prompt_tokens
            self.first_token_seconds[label] += now - tracker.arrival
        else:
            self.between_tokens.observe(now - tracker.last_token)
        tracker.last_token = now
        self.generation_tokens[label] += new_tokens

    def finished(self, tracker: Tracker, reasons: list[str], now: float) -> None:
        """A request ended, each of its completions for one of `reasons`."""
        for reason in reasons:
            self.ended[reason] += 1
            self.requests[self.labels.of(tracker.adapter), reason] += 1
        self.whole_request.observe(now - tracker.arrival)

    def forget(self, known: Collection[str]) -> None:
        """Drop the counts of adapters that are unloaded. On the engine's thread, as all writes."""
        for label in self.labels.forget(known):
            for counts in (self.prompt_tokens, self.generation_tokens, self.first_tokens):
                counts.pop(label, None)
            self.first_token_seconds.pop(label, None)
            for key in [key for key in self.requests if key[0] == label]:
                del self.requests[key]
