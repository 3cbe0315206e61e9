"""Times lm_head on a GPU: logits in bfloat16, in bfloat16 and then widened, and in float32.

`python bench/lm_head.py` has Qwen3-30B-A3B's head, [2048 -> 151936]. Each product alone, and with
what a decode graph does next: the likeliest token of each row, and the copy of the logits that is
kept. CUDA graph replays, medians, contenders in turns. Errors are those of a log-probability,
largest over some rows and all tokens, against float64. The last line is JSON.
`--dry`: on a CPU, in Triton's interpreter, with tiny sizes: whether it runs.
"""

import argparse
import functools
import json
from collections.abc import Callable

import torch
from torch.nn import functional

from vexpert.bench.timer import Call, make_timer
from vexpert.checkout import commit
from vexpert.kernels.argmax import Scratch, argmax_rows
from vexpert.ops.float32_linear import float32_linear

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
ROWS = (1, 8, 32, 128, 256)
SHAPE = (2048, 151_936)  # hidden, vocabulary
DRY_ROWS, DRY_SHAPE = (1, 3), (32, 70)
CHECKED = 4  # rows


def widened(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return functional.linear(x, weight).float()


def of_library(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return float32_linear(x, weight, None)


def on_cpu(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """What the library gives on a GPU alone."""
    return x.float() @ weight.float().t()


def contenders(x: torch.Tensor, weight: torch.Tensor) -> dict[str, Call]:
    """Name -> call: three products, and each with the likeliest tokens."""
    rows, vocab = x.shape[0], weight.shape[0]
    float32 = of_library if x.is_cuda else on_cpu
    products: dict[str, Product] = {
        "bfloat16": functional.linear, "widened": widened, "float32": float32
    }  # fmt: skip
    calls: dict[str, Call] = {}
    for name, product in products.items():
        call = functools.partial(product, x, weight)
        scratch = Scratch.empty(rows, vocab, x.device)
        kept = torch.empty_like(call())
        tokens = torch.empty(rows, dtype=torch.int64, device=x.device)

        def both(call: Call = call, scratch: Scratch = scratch, kept: torch.Tensor = kept,
                 tokens: torch.Tensor = tokens) -> torch.Tensor:  # fmt: skip
            return argmax_rows(call(), scratch, tokens, kept)

        calls |= {name: call, f"{name}, token": both}
    return calls


def errors(calls: dict[str, Call], x: torch.Tensor, weight: torch.Tensor) -> dict[str, float]:
    """The largest error of a log-probability, by product."""
    want = (x[:CHECKED].double() @ weight.double().t()).log_softmax(-1)
    products = {name: call for name, call in calls.items() if not name.endswith("token")}
    return {
        name: float((call()[:CHECKED].double().log_softmax(-1) - want).abs().max())
        for name, call in products.items()
    }


@torch.inference_mode()
def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--dry", action="store_true")
    given = parser.parse_args(arguments)
    device = torch.device("cpu" if given.dry else "cuda")
    depth, vocab = DRY_SHAPE if given.dry else SHAPE
    torch.manual_seed(0)
    weight = torch.randn(vocab, depth, device=device).mul_(2 * depth**-0.5).bfloat16()
    timer, found = make_timer(device, given.repeats), {}
    for rows in DRY_ROWS if given.dry else ROWS:
        x = torch.randn(rows, depth, device=device).bfloat16()
        calls = contenders(x, weight)
        wrong = errors(calls, x, weight)
        times = timer.time_in_turns({name: timer.prepare(call) for name, call in calls.items()})
        us = {name: round(timing.median, 1) for name, timing in times.items()}
        found[rows] = {"us": us, "errors": wrong}
        print(f"{rows} rows, us:", " | ".join(f"{name} {value}" for name, value in us.items()))
        print("   errors:", " | ".join(f"{name} {value:.1e}" for name, value in wrong.items()))
    print(json.dumps({"commit": commit(), "shape": [depth, vocab], "rows": found}))


if __name__ == "__main__":
    main()
