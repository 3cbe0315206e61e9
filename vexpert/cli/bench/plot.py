"""A run of `vexpert bench serve` as a picture."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from vexpert.errors import ConfigError

if TYPE_CHECKING:
    from vexpert.cli.client import Reply

BINS = 60
REMEDY = "pip install 'vexpert[plots]', or leave --plot out"


def check_plot(file: str) -> None:
    """Raise ConfigError if the picture could not be drawn or written, before anything is sent."""
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError as error:
        raise ConfigError(f"plot: matplotlib is missing: {REMEDY}") from error
    path = Path(file)
    if path.suffix != ".png":
        raise ConfigError(f"plot: {file}: give a name that ends in .png")
    if not path.parent.is_dir():
        raise ConfigError(f"plot: {file}: no folder {path.parent}; make it first")


def draw(replies: "list[Reply]", title: str, file: str) -> None:
    """Write latencies by arrival, their distributions, and tokens/s over time to `file`, a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=10)
    arrivals, shares, tokens = figure.subplots(1, 3)
    _arrivals(arrivals, replies)
    _shares(shares, replies)
    _tokens(tokens, replies)
    figure.savefig(file, dpi=110)


def _arrivals(axes: Any, replies: "list[Reply]") -> None:
    start = min(reply.started for reply in replies)
    at = [reply.started - start for reply in replies]
    axes.plot(at, first_token_ms(replies), ".", markersize=4)
    axes.set(xlabel="sent after (s)", ylabel="time to first token (ms)", ylim=(0, None))


def _shares(axes: Any, replies: "list[Reply]") -> None:
    curves = {
        "first token": first_token_ms(replies),
        "per token after it": per_token_ms(replies),
        "whole answer": [1000 * (reply.ended - reply.started) for reply in replies],
    }
    for label, values in curves.items():
        if values:
            axes.ecdf(values, label=label)
    axes.set(xlabel="ms", ylabel="share of requests", xscale="log")
    axes.legend(fontsize=8)


def _tokens(axes: Any, replies: "list[Reply]") -> None:
    start = min(reply.started for reply in replies)
    times = [time - start for reply in replies for time in reply.token_times]
    width = max(times, default=0.0) / BINS or 1.0
    axes.hist(times, bins=BINS, weights=[1 / width] * len(times), histtype="stepfilled")
    axes.set(xlabel="s", ylabel="tokens/s")


def first_token_ms(replies: "list[Reply]") -> list[float]:
    """Milliseconds to each reply's first token; to its end where it has none."""
    return [1000 * ((r.token_times or [r.ended])[0] - r.started) for r in replies]


def per_token_ms(replies: "list[Reply]") -> list[float]:
    """Milliseconds for each token after the first, of the replies that have one."""
    return [
        1000 * (r.ended - r.token_times[0]) / (r.completion_tokens - 1)
        for r in replies
        if r.token_times and r.completion_tokens > 1
    ]
