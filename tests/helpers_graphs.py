"""CUDA graphs of what a test calls, and ways to serve that graphs and overlap are tried with."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

T = TypeVar("T")
# Options of `make_engine`.
WAYS_TO_SERVE: dict[str, dict[str, Any]] = {
    "roomy": {"num_blocks": 64},
    "tiny chunks": {"max_num_batched_tokens": 5},
    "few blocks": {"num_blocks": 18},
    "few blocks, one slot": {"num_blocks": 18, "num_slots": 1, "max_num_batched_tokens": 7},
    "no prefix cache": {"enable_prefix_caching": False, "num_blocks": 20},
    "block of one": {"block_size": 1, "num_blocks": 70},
}


def capture(call: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
    """`call` in a graph, after a warm-up on a side stream; and what it gave as it was captured."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return graph, result
