"""One MoE layer with adapters in all its slots, wired as the server wires it."""

from dataclasses import replace

import torch
from torch import nn

from vexpert.bench.cases import Case
from vexpert.bench.draw import Draw
from vexpert.bench.shapes import find_shape
from vexpert.lora.layers import experts_hooks
from vexpert.lora.pack import PackedAdapter, pack, start_alignment
from vexpert.lora.pool import SlotPool
from vexpert.lora.types import (
    AdapterWeights,
    BatchView,
    ExpertsFactors,
    ExpertsTarget,
    Factors,
    LoraState,
    TargetMap,
)
from vexpert.models.experts import attach_experts
from vexpert.models.probe import Probe
from vexpert.models.swap import attach_runners
from vexpert.models.targets import build_targets
from vexpert.moe.runner import MoeRunner
from vexpert.ops.backend import FusedExperts, LoraBackend
from vexpert.ops.types import LoraSite, SiteTable

PATH = "experts"


class BenchLayer:
    """Experts and adapters of one case, on the device. Cases that differ in rows share it."""

    def __init__(
        self, case: Case, device: torch.device, dtype: torch.dtype, backend: LoraBackend
    ) -> None:
        self.shape = find_shape(case.shape)
        self.device = device
        self.dtype = dtype
        self.backend = backend
        module = self.shape.make(device, dtype, case.seed)
        model = nn.ModuleDict({PATH: module})
        experts = attach_experts(model)
        attach_runners(experts, backend)
        self.run = experts[PATH]
        targets = build_targets(model, Probe({}), experts, self.shape.name, max(case.ranks))
        target = targets.targets[PATH]
        assert isinstance(target, ExpertsTarget)
        self.target = target
        self.pool = _fill_pool(case, targets, target, device, dtype)
        self.state = LoraState(tables=self.pool.tables)
        self.run.hooks = experts_hooks(target, self.state, backend)

    @property
    def sites(self) -> tuple[tuple[LoraSite, SiteTable], tuple[LoraSite, SiteTable]]:
        """gate_up, then down, each with its table."""
        up, down = self.target.gate_up, self.target.down
        return (up, self.pool.tables[up.index]), (down, self.pool.tables[down.index])

    @property
    def fused(self) -> FusedExperts | None:
        """The layer as one operation, where the backend has it."""
        runner = self.run.runner
        assert isinstance(runner, MoeRunner)
        return runner.fused

    def forward(self, draw: Draw, with_lora: bool, classic: bool = False) -> torch.Tensor:
        """The layer's output [T, H] for one step."""
        view = BatchView(draw.slots, draw.slots, draw.active_slots, not classic)
        self.state.set_view(view if with_lora else None)
        return self.run(draw.hidden, draw.topk_ids, draw.topk_weights)


def layer_key(case: Case) -> Case:
    """Equal for cases that can share a BenchLayer."""
    return replace(
        case,
        tokens=1,
        adapters=1,
        base_share=0.0,
        popularity="uniform",
        expert_popularity="uniform",
        adapter_rows_only=False,
        seed=0,
    )


def _fill_pool(
    case: Case,
    targets: TargetMap,
    target: ExpertsTarget,
    device: torch.device,
    dtype: torch.dtype,
) -> SlotPool:
    """A random adapter in each slot. Laid out once per rank, then filled on the device."""
    layouts = {rank: _layout(target, targets, rank, case.shared_a, dtype) for rank in case.ranks}
    ranks = [case.ranks[slot % len(case.ranks)] for slot in range(case.slots)]
    alignment = start_alignment(targets, device, dtype) * dtype.itemsize
    size = sum(-(-layouts[rank].nbytes // alignment) * alignment for rank in ranks)
    pool = SlotPool(targets, case.slots, size, device, dtype)
    generator = torch.Generator(device).manual_seed(case.seed)
    for slot, rank in enumerate(ranks):
        layout = layouts[rank]
        installed = pool.install(replace(layout, buffer=_random(layout, targets, generator)))
        assert installed == slot, (installed, slot)
    return pool


def _layout(
    target: ExpertsTarget, targets: TargetMap, rank: int, shared_a: bool, dtype: torch.dtype
) -> PackedAdapter:
    """An adapter of zeros on gate (if there is one), up and down, as the server would pack it."""
    hidden, inter, experts = target.hidden_size, target.intermediate_size, target.num_experts
    zero = torch.zeros((), dtype=dtype)

    def factors(inputs: int, outputs: int) -> Factors:
        a, b = (experts, rank, inputs), (experts, outputs, rank)
        return Factors(zero.expand(a), zero.expand(b), 1.0)

    gate, up = factors(hidden, inter), factors(hidden, inter)
    if shared_a:
        gate = Factors(up.a, gate.b, 1.0)
    parts = ExpertsFactors(gate if target.has_gate else None, up, factors(inter, hidden))
    return pack(AdapterWeights({PATH: parts}), targets, dtype)


def _random(layout: PackedAdapter, targets: TargetMap, generator: torch.Generator) -> torch.Tensor:
    """Values [N] that make the delta about as large as the layer's input."""
    count, dtype = layout.buffer.numel(), layout.buffer.dtype
    buffer = torch.randn(count, dtype=dtype, device=generator.device, generator=generator)
    for entry in layout.entries:
        site = targets.sites[entry.site]
        a_size = site.num_experts * entry.rank * site.in_features
        buffer[entry.a_offset :][:a_size] *= site.in_features**-0.5
        for output, rank, offset in zip(site.slices, entry.slice_rank, entry.b_offset, strict=True):
            buffer[offset:][: site.num_experts * rank * output.size] *= rank**-0.5
    return buffer
