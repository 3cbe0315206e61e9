"""Times paged attention on a GPU: decode by batch and context, prefill by prompts.

    python bench/attention.py            # 32 query heads, 4 KV heads, width 128, bfloat16
    python bench/attention.py --heads 64 --kv-heads 8 --width 64 --window 128

Each figure is microseconds of one layer's call: a CUDA graph of several layers, each with a cache
of its own, the L2 flushed before each replay. Each cell is first compared with float64.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch

from vexpert.bench.timer import GraphTimer
from vexpert.ops.attention import AttentionBatch, paged_attention, reference_attention

BLOCK_SIZE = 16
CACHE_BYTES = 12e9  # of all layers of a graph
DECODES = [(batch, context) for batch in (1, 8, 32, 128) for context in (100, 1000, 8192)]
PREFILLS = [(16, 512), (1, 2048), (1, 8192)]
LIMIT = 2e-2


@dataclass(frozen=True)
class Step:
    """`sequences` with `queries` query rows and `keys` keys each; one cache for each layer."""

    query: torch.Tensor
    caches: list[tuple[torch.Tensor, torch.Tensor]]
    batch: AttentionBatch
    options: dict[str, float | int | None]

    def run(self) -> torch.Tensor:
        for keys, values in self.caches:
            out = paged_attention(self.query, keys, values, self.batch, **self.options)
        return out

    def error(self) -> float:
        """||out - expected|| / ||expected|| of the first layer."""
        call = (self.query, *self.caches[0], self.batch)
        want = reference_attention(*call, **self.options, out=self.query.double())
        got = paged_attention(*call, **self.options).double()
        return float((got - want).norm() / want.norm())


def make_step(sequences: int, queries: int, keys: int, args: argparse.Namespace) -> Step:
    width = -(-keys // BLOCK_SIZE)
    tables = torch.randperm(sequences * width, device="cuda").view(sequences, width)
    shape = (tables.numel() * BLOCK_SIZE, args.kv_heads, args.width)
    layer_bytes = 4 * shape[0] * shape[1] * shape[2]
    layers = max(2, min(16, int(CACHE_BYTES / layer_bytes)))
    options = {"device": "cuda", "dtype": torch.bfloat16}
    caches = [(torch.randn(shape, **options), torch.randn(shape, **options)) for _ in range(layers)]
    batch = AttentionBatch(
        query_starts=torch.arange(sequences + 1, device="cuda") * queries,
        kv_lens=torch.full((sequences,), keys, device="cuda"),
        block_tables=tables,
        block_size=BLOCK_SIZE,
        max_query_len=queries,
        max_kv_len=args.bound or keys,
    )
    query = torch.randn(sequences * queries, args.heads, args.width, **options)
    return Step(query, caches, batch, {"scaling": args.width**-0.5, "window": args.window})


def timed(timer: GraphTimer, step: Step) -> float:
    """Microseconds of one layer, or NaN where the output is wrong."""
    error = step.error()
    if not error < LIMIT:
        sys.stdout.write(f"WRONG: relative error {error:.1e}\n")
        return float("nan")
    timing = timer.time_in_turns({"": timer.prepare(step.run)})[""]
    return (timing.median - timer.overhead) / len(step.caches)


def report(cells: list[tuple[int, int]], measure: Callable[[int, int], str]) -> None:
    for sequences, length in cells:
        sys.stdout.write(f"{sequences:4d} x {length:5d}  {measure(sequences, length)}\n")
        sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--window", type=int)
    parser.add_argument("--bound", type=int, help="max_kv_len, as in a captured graph")
    args = parser.parse_args()
    timer = GraphTimer(torch.device("cuda"), 20)

    def decode(sequences: int, context: int) -> str:
        us = timed(timer, make_step(sequences, 1, context, args))
        keys = min(context, args.window or context)
        moved = sequences * keys * 4 * args.kv_heads * args.width
        return f"{us:8.2f} us {moved / us / 1e3:6.0f} GB/s"

    def prefill(sequences: int, length: int) -> str:
        us = timed(timer, make_step(sequences, length, length, args))
        seen = torch.arange(1, length + 1).clamp(max=args.window or length).sum().item()
        work = sequences * seen * 4 * args.heads * args.width
        return f"{us:8.1f} us {work / us / 1e6:6.0f} TFLOP/s"

    sys.stdout.write(f"decode, sequences x context ({torch.cuda.get_device_name()})\n")
    report(DECODES, decode)
    sys.stdout.write("prefill, prompts x tokens\n")
    report(PREFILLS, prefill)


if __name__ == "__main__":
    main()
