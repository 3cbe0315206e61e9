"""One MoE layer on the CPU: transformers' grouped_mm experts, our base, and ours with LoRA.

float32, hidden 256, intermediate 256, 32 experts, top-4; 8 adapters of rank 8 on gate, up and
down, spread over the rows in turn (at one token: one adapter). Calls cycle over the weights of 8
layers, so that caches hold what they would hold in a model. The contenders take turns.
Microseconds a layer, median and quartiles. LoRA includes its routing. The last line is JSON.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch.nn import functional
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from vexpert.moe.runner import MoeRunner
from vexpert.moe.types import ExpertWeights, MoeHooks, PairRows
from vexpert.ops.backend import LoraBackend, Routing, select_backend
from vexpert.ops.types import LoraSite, OutputSlice, SiteTable

LAYERS, EXPERTS, TOP_K, HIDDEN, INNER = 8, 32, 4, 256, 256
SLOTS, RANK = 8, 8
Call = Callable[[], object]


def make_module() -> Qwen3MoeExperts:
    config = Qwen3MoeConfig(
        hidden_size=HIDDEN,
        moe_intermediate_size=INNER,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
    )
    config._experts_implementation = "grouped_mm"
    module = Qwen3MoeExperts(config)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    return module


def activate(y: torch.Tensor) -> torch.Tensor:
    gate, up = y.chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)


def make_runner(module: Qwen3MoeExperts, backend: LoraBackend) -> MoeRunner:
    gate_up = torch.nn.Parameter(module.gate_up_proj.detach().clone())
    down = torch.nn.Parameter(module.down_proj.detach().clone())
    return MoeRunner(
        ExpertWeights(
            gate_up=gate_up,
            down=down,
            gate_up_bias=None,
            down_bias=None,
            is_transposed=False,
            has_gate=True,
            is_interleaved=False,
            scale_input=False,
            activate=activate,
            num_experts=EXPERTS,
            hidden_size=HIDDEN,
            intermediate_size=INNER,
        ),
        backend,
    )


def make_table(site: LoraSite) -> SiteTable:
    """Adapters whose slices share one A, as fused checkpoints have it."""
    n = len(site.slices)
    a_size = EXPERTS * RANK * site.in_features
    b_size = EXPERTS * RANK * site.slices[0].size
    arena = torch.randn(SLOTS * (a_size + n * b_size)) * 0.05
    start = torch.arange(SLOTS) * (a_size + n * b_size)
    packed = torch.zeros(3 + 4 * n, SLOTS, dtype=torch.int64)
    table = SiteTable(arena, packed, host_rank=[RANK] * SLOTS)
    table.rank[:] = table.slice_rank[:] = RANK
    table.a_offset[:] = start
    table.a_stride[:] = RANK * site.in_features
    table.b_offset[:] = start + a_size + b_size * torch.arange(n)[:, None]
    table.b_stride[:] = RANK * site.slices[0].size
    return table


class Lora:
    """Both hooks of one layer over one routing, as the server's layers do it."""

    def __init__(self, index: int, backend: LoraBackend) -> None:
        halves = (OutputSlice(0, INNER), OutputSlice(INNER, INNER))
        whole = (OutputSlice(0, HIDDEN),)
        self.gate_up = LoraSite(2 * index, "gate_up", EXPERTS, HIDDEN, 2 * INNER, halves, 2 * RANK)
        self.down = LoraSite(2 * index + 1, "down", EXPERTS, INNER, HIDDEN, whole, RANK)
        self.tables = make_table(self.gate_up), make_table(self.down)
        self.backend = backend
        self.slots = torch.empty(0, dtype=torch.int64)
        self.routing: Routing | None = None
        self.hooks = MoeHooks(self.after_gate_up, self.after_down)

    def after_gate_up(
        self, x: torch.Tensor, x_rows: torch.Tensor | None, y: torch.Tensor, rows: PairRows
    ) -> None:
        self.routing = self.backend.route(self.slots[rows.token], rows.expert, EXPERTS, SLOTS)
        self.backend.apply(x, y, self.gate_up, self.tables[0], self.routing, x_rows)

    def after_down(
        self, x: torch.Tensor, x_rows: torch.Tensor | None, y: torch.Tensor, rows: PairRows
    ) -> None:
        assert self.routing is not None
        self.backend.apply(x, y, self.down, self.tables[1], self.routing, x_rows)


def time_in_turns(
    calls: dict[str, list[Call]], rounds: int, clock: Callable[[], float]
) -> dict[str, list[float]]:
    """Microseconds a layer of each contender: one pass over all layers per round, in turns."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 3):
        for name, layers in calls.items():
            start = clock()
            for call in layers:
                call()
            if turn >= 3:
                times[name].append((clock() - start) / len(layers) * 1e6)
    return times


def measure(
    tokens: int,
    rounds: int,
    clock: Callable[[], float],
    modules: list[Qwen3MoeExperts],
    runners: list[MoeRunner],
    loras: list[Lora],
) -> dict[str, float]:
    x = torch.randn(tokens, HIDDEN)
    calls: dict[str, list[Call]] = {"transformers": [], "base": [], "lora": []}
    for module, runner, lora in zip(modules, runners, loras, strict=True):
        ids = torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(tokens)])
        weights = torch.rand(tokens, TOP_K).softmax(-1)
        lora.slots = torch.arange(tokens) % SLOTS
        torch.testing.assert_close(runner(x, ids, weights), module(x, ids, weights))
        calls["transformers"].append(partial(module, x, ids, weights))
        calls["base"].append(partial(runner, x, ids, weights, None))
        calls["lora"].append(partial(runner, x, ids, weights, lora.hooks))
    row: dict[str, float] = {"tokens": tokens}
    for name, values in time_in_turns(calls, rounds, clock).items():
        low, middle, high = statistics.quantiles(values, n=4)
        row |= {name: round(middle), f"{name}_q1": round(low), f"{name}_q3": round(high)}
    # Of the first quartiles: a busy machine only ever adds time.
    row["lora_added_percent"] = round((row["lora_q1"] / row["base_q1"] - 1) * 100, 1)
    row["base_speedup"] = round(row["transformers_q1"] / row["base_q1"], 2)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--cpu-time", action="store_true", help="one thread's CPU time: for a busy machine"
    )
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 32])
    options = parser.parse_args()
    clock = time.perf_counter
    if options.cpu_time:
        options.threads, clock = 1, time.thread_time
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    backend = select_backend("auto", "cpu", torch.float32)
    with torch.inference_mode():
        modules = [make_module() for _ in range(LAYERS)]
        runners = [make_runner(module, backend) for module in modules]
        loras = [Lora(index, backend) for index in range(LAYERS)]
        rows = [measure(t, options.rounds, clock, modules, runners, loras) for t in options.tokens]
    for row in rows:
        print("  ".join(f"{name} {value}" for name, value in row.items()))
    print(json.dumps({"threads": options.threads, "torch": torch.__version__, "rows": rows}))


if __name__ == "__main__":
    main()
