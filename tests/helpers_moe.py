"""A MoE layer of random experts with LoRA, and the naive loop that says what it must give."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from helpers_lora import SlotSpec, make_site, make_table
from torch.nn import functional

from vexpert.moe.types import ExpertWeights, MoeHooks, PairRows
from vexpert.ops.backend import LoraBackend, Routing
from vexpert.ops.reference import row_delta
from vexpert.ops.types import ExpertsLora, LoraSite, OutputSlice, SiteTable

HIDDEN, INNER = 32, 24


@dataclass(frozen=True)
class Flags:
    """How a checkpoint keeps its experts."""

    is_transposed: bool = False
    has_gate: bool = True
    is_interleaved: bool = False
    has_bias: bool = False
    scale_input: bool = False


@dataclass(frozen=True)
class Layer:
    """Weights, adapters and one step's input. The naive loop reads nothing else."""

    weights: ExpertWeights
    flags: Flags
    sites: tuple[LoraSite, LoraSite]  # gate_up, down
    tables: tuple[SiteTable, SiteTable]
    hidden: torch.Tensor  # [T, H]
    topk_ids: torch.Tensor  # [T, K]
    topk_weights: torch.Tensor  # [T, K]
    slots: torch.Tensor  # [T]


def activation(flags: Flags) -> Callable[[torch.Tensor], torch.Tensor]:
    """silu(gate) * up, or a squared relu without a gate."""

    def activate(y: torch.Tensor) -> torch.Tensor:
        if not flags.has_gate:
            return functional.relu(y) ** 2
        gate, up = (y[..., ::2], y[..., 1::2]) if flags.is_interleaved else y.chunk(2, -1)
        return functional.silu(gate) * up

    return activate


def make_sites(experts: int, flags: Flags, max_lora_rank: int) -> tuple[LoraSite, LoraSite]:
    parts: tuple[OutputSlice, ...] = (OutputSlice(0, INNER),)
    if flags.has_gate and flags.is_interleaved:
        parts = (OutputSlice(0, INNER, 2), OutputSlice(1, INNER, 2))
    elif flags.has_gate:
        parts = (OutputSlice(0, INNER), OutputSlice(INNER, INNER))
    gate_up = make_site(experts, HIDDEN, parts, max_lora_rank, index=0)
    return gate_up, make_site(experts, INNER, HIDDEN, max_lora_rank, index=1)


def make_layer(
    tokens: int,
    top_k: int,
    experts: int,
    rank: int = 8,
    flags: Flags | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    sentinel_share: float = 0.0,
) -> Layer:
    """Three adapters (rank, half of it, down alone) and base rows."""
    flags = flags or Flags()
    torch.manual_seed(tokens * 100 + top_k * 10 + experts)
    n = 2 * INNER if flags.has_gate else INNER

    def random(*shape: int) -> torch.nn.Parameter:
        values = torch.randn(*shape) * HIDDEN**-0.5
        return torch.nn.Parameter(values.to(device, dtype), requires_grad=False)

    transposed = flags.is_transposed
    weights = ExpertWeights(
        gate_up=random(experts, HIDDEN, n) if transposed else random(experts, n, HIDDEN),
        down=random(experts, INNER, HIDDEN) if transposed else random(experts, HIDDEN, INNER),
        gate_up_bias=random(experts, n) if flags.has_bias else None,
        down_bias=random(experts, HIDDEN) if flags.has_bias else None,
        is_transposed=transposed,
        has_gate=flags.has_gate,
        is_interleaved=flags.is_interleaved,
        scale_input=flags.scale_input,
        activate=activation(flags),
        num_experts=experts,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
    )
    sites = make_sites(experts, flags, rank)
    slices = len(sites[0].slices)
    ranks = ((rank,) * slices, (rank // 2,) * slices, (0,) * slices)
    tables = (
        make_table(sites[0], [SlotSpec(r) for r in ranks], dtype, device, 1),
        make_table(sites[1], [SlotSpec((r,)) for r in (rank, rank // 2, 3)], dtype, device, 2),
    )
    ids = torch.rand(tokens, experts).argsort(1)[:, :top_k].contiguous()
    ids[torch.rand(ids.shape) < sentinel_share] = -1
    ids[torch.rand(ids.shape) < sentinel_share / 2] = experts
    return Layer(
        weights,
        flags,
        sites,
        tables,
        torch.randn(tokens, HIDDEN).to(device, dtype),
        ids.to(device),
        torch.rand(tokens, top_k).to(device, dtype),
        torch.randint(-1, 3, (tokens,)).to(device),
    )


class Hooks:
    """Both hooks over one routing, as the server's layers do it."""

    def __init__(self, layer: Layer, backend: LoraBackend, classic: bool = False) -> None:
        self.layer = layer
        self.backend = backend
        self.classic = classic
        self.routing: Routing | None = None
        self.hooks = MoeHooks(self.after_gate_up, self.after_down)
        if backend.name == "triton" and not classic:
            gate_up, down = zip(layer.sites, layer.tables, strict=True)
            fused = ExpertsLora(layer.slots, (0, 1, 2), gate_up, down)
            self.hooks = replace(self.hooks, fused=fused)

    def after_gate_up(
        self, x: torch.Tensor, x_rows: torch.Tensor | None, y: torch.Tensor, rows: PairRows
    ) -> None:
        slots = self.layer.slots[rows.token]
        experts = self.layer.weights.num_experts
        if not self.classic:
            self.routing = self.backend.route(slots, rows.expert, experts, 3)
        self.add(0, x, x_rows, y, rows)

    def after_down(
        self, x: torch.Tensor, x_rows: torch.Tensor | None, y: torch.Tensor, rows: PairRows
    ) -> None:
        self.add(1, x, x_rows, y, rows)

    def add(
        self,
        index: int,
        x: torch.Tensor,
        x_rows: torch.Tensor | None,
        y: torch.Tensor,
        rows: PairRows,
    ) -> None:
        site, table = self.layer.sites[index], self.layer.tables[index]
        if self.routing is not None:
            self.backend.apply(x, y, site, table, self.routing, x_rows)
            return
        slots = self.layer.slots[rows.token]
        self.backend.apply_per_adapter(x, y, site, table, slots, rows.expert, (0, 1, 2), x_rows)


def naive(layer: Layer, with_lora: bool) -> torch.Tensor:
    """[T, H] float64: one pair at a time."""
    weights, flags = layer.weights, layer.flags
    out = torch.zeros(layer.hidden.shape, dtype=torch.float64)
    ids, scales = layer.topk_ids.tolist(), layer.topk_weights.tolist()
    slots = layer.slots.tolist()
    activate = activation(flags)
    for t, k in itertools.product(range(len(ids)), range(layer.topk_ids.shape[1])):
        expert, slot = ids[t][k], slots[t] if with_lora else -1
        if not 0 <= expert < weights.num_experts:
            continue
        x = layer.hidden[t].double().cpu() * (scales[t][k] if flags.scale_input else 1.0)
        y = _product(layer, 0, x, expert, slot)
        y = _product(layer, 1, activate(y), expert, slot)
        out[t] += y * (1.0 if flags.scale_input else scales[t][k])
    return out


def _product(layer: Layer, index: int, x: torch.Tensor, expert: int, slot: int) -> torch.Tensor:
    """One pair's gate_up (0) or down (1), float64."""
    weights = layer.weights
    matrix = (weights.gate_up, weights.down)[index][expert].double().cpu()
    bias = (weights.gate_up_bias, weights.down_bias)[index]
    y = x @ matrix if weights.is_transposed else matrix @ x
    if bias is not None:
        y = y + bias[expert].double().cpu()
    if slot >= 0:
        table = layer.tables[index]
        table = replace(table, arena=table.arena.cpu())
        y = y + row_delta(x, layer.sites[index], table, slot, expert)
    return y
