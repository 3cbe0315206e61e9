"""A small model's targets, random adapters and their dense deltas, and a backend that counts."""

from typing import Any

import torch

from vexpert.lora.types import (
    AdapterWeights,
    BatchView,
    EmbeddingTarget,
    ExpertsFactors,
    ExpertsTarget,
    Factors,
    LinearTarget,
    LoraState,
    TargetMap,
)
from vexpert.ops.torch_backend import TorchBackend
from vexpert.ops.torch_routing import TorchRouting
from vexpert.ops.types import LoraSite, OutputSlice, SiteTable

HIDDEN, INNER, EXPERTS, VOCAB, MAX_RANK = 16, 12, 4, 20, 8


def _halves(size: int) -> tuple[OutputSlice, ...]:
    return OutputSlice(0, size), OutputSlice(size, size)


def _alternating(size: int) -> tuple[OutputSlice, ...]:
    return OutputSlice(0, size, 2), OutputSlice(1, size, 2)


class TargetBuilder:
    """Numbers sites as it adds targets."""

    def __init__(self, max_rank: int = MAX_RANK) -> None:
        self.max_rank = max_rank
        self.sites: list[LoraSite] = []
        self.map = TargetMap("tiny", "TinyForCausalLM", {}, ())

    def site(
        self, name: str, experts: int, width: int, out: int, slices: tuple[OutputSlice, ...]
    ) -> LoraSite:
        rank = len(slices) * self.max_rank
        site = LoraSite(len(self.sites), name, experts, width, out, slices, rank)
        self.sites.append(site)
        return site

    def linear(self, path: str, width: int, out: int) -> LinearTarget:
        site = self.site(path, 1, width, out, (OutputSlice(0, out),))
        target = LinearTarget(path, site, width, out)
        self.map.targets[path] = target
        return target

    def embedding(self, path: str, count: int, width: int) -> EmbeddingTarget:
        site = self.site(path, count, 1, width, (OutputSlice(0, width),))
        target = EmbeddingTarget(path, site, count, width)
        self.map.targets[path] = target
        return target

    def experts(self, path: str, has_gate: bool = True, interleaved: bool = False) -> ExpertsTarget:
        slices = _alternating(INNER) if interleaved else _halves(INNER)
        if not has_gate:
            slices = (OutputSlice(0, INNER),)
        width = INNER * len(slices)
        gate_up = self.site(f"{path}.gate_up", EXPERTS, HIDDEN, width, slices)
        down = self.site(f"{path}.down", EXPERTS, INNER, HIDDEN, (OutputSlice(0, HIDDEN),))
        target = ExpertsTarget(
            path, gate_up, down, EXPERTS, HIDDEN, INNER, has_gate, False, interleaved, "TinyExperts"
        )
        self.map.targets[path] = target
        return target

    def build(self) -> TargetMap:
        made = self.map
        return TargetMap(made.model_type, made.architecture, made.targets, tuple(self.sites))


def tiny_targets(max_rank: int = MAX_RANK) -> TargetMap:
    """One target of every kind."""
    builder = TargetBuilder(max_rank)
    builder.embedding("embed", VOCAB, HIDDEN)
    builder.linear("q", HIDDEN, 24)
    builder.linear("router", HIDDEN, EXPERTS)
    builder.experts("experts")
    builder.experts("alternating", interleaved=True)
    builder.experts("ungated", has_gate=False)
    builder.linear("head", HIDDEN, VOCAB)
    return builder.build()


def factors(
    generator: torch.Generator,
    shape_a: tuple[int, int, int],
    shape_b: tuple[int, int, int],
    scale: float = 0.5,
    a: torch.Tensor | None = None,
) -> Factors:
    """Random signed factors; `a`, if given, is shared with another projection."""
    chosen = torch.randn(shape_a, generator=generator) if a is None else a
    return Factors(chosen, torch.randn(shape_b, generator=generator), scale)


EXPERT_KINDS = ("fused", "separate", "gate", "up", "down", "gate_up", "outer", "mixed")


def expert_factors(
    generator: torch.Generator, kind: str, rank: int, has_gate: bool = True
) -> ExpertsFactors:
    """Every layout a checkpoint may have: see EXPERT_KINDS. Ranks of gate and up may differ."""
    each, one = EXPERTS, 1
    in_a, out_a = (HIDDEN, INNER), (INNER, HIDDEN)

    def make(sides: tuple[int, int], lead: tuple[int, int], r: int) -> Factors:
        return factors(generator, (lead[0], r, sides[0]), (lead[1], sides[1], r), scale=0.25 * r)

    up = make(in_a, (each, each), max(1, rank - 1))
    down = make(out_a, (each, each), rank)
    gate = make(in_a, (each, each), rank)
    if kind == "fused":
        up = factors(generator, (each, rank, HIDDEN), (each, INNER, rank), 1.5, a=gate.a)
    elif kind == "outer":
        gate, up = make(in_a, (one, each), rank), make(in_a, (one, each), rank)
        down = make(out_a, (each, one), rank)
    elif kind == "mixed":
        gate, down = make(in_a, (one, each), rank), make(out_a, (one, one), rank)
    keep = {"gate": {"gate"}, "up": {"up"}, "down": {"down"}, "gate_up": {"gate", "up"}}
    wanted = keep.get(kind, {"gate", "up", "down"})
    return ExpertsFactors(
        gate if "gate" in wanted and has_gate else None,
        up if "up" in wanted or (kind == "gate" and not has_gate) else None,
        down if "down" in wanted else None,
    )


def adapter(
    targets: TargetMap, seed: int, rank: int, paths: tuple[str, ...] = (), kind: str = "fused"
) -> AdapterWeights:
    """A random adapter on `paths` (default: every target)."""
    generator = torch.Generator().manual_seed(seed)
    modules: dict[str, Factors | ExpertsFactors] = {}
    for path, target in targets.targets.items():
        if paths and path not in paths:
            continue
        if isinstance(target, ExpertsTarget):
            modules[path] = expert_factors(generator, kind, rank, target.has_gate)
        elif isinstance(target, EmbeddingTarget):
            sides = target.num_embeddings, target.embedding_dim
            modules[path] = factors(generator, (1, rank, sides[0]), (1, sides[1], rank))
        else:
            sides = target.in_features, target.out_features
            modules[path] = factors(generator, (1, rank, sides[0]), (1, sides[1], rank))
    return AdapterWeights(modules)


def dense(part: Factors | None, expert: int, out: int, width: int) -> torch.Tensor:
    """scale * B @ A of one expert, [out, in] float32; zeros when there is no part."""
    if part is None:
        return torch.zeros(out, width)
    a = part.a[expert if part.a.shape[0] > 1 else 0].float()
    b = part.b[expert if part.b.shape[0] > 1 else 0].float()
    return part.scale * (b @ a)


def canonical_delta(targets: TargetMap, weights: AdapterWeights, site: LoraSite) -> torch.Tensor:
    """Dense delta [experts, out, in] that `weights` mean at `site`; of an embedding [V, D, 1]."""
    result = torch.zeros(site.num_experts, site.out_features, site.in_features)
    for path, module in weights.modules.items():
        target = targets.targets[path]
        if isinstance(target, ExpertsTarget):
            assert isinstance(module, ExpertsFactors)
            if site is target.down:
                parts = [module.down]
            elif site is target.gate_up:
                parts = [module.gate, module.up] if target.has_gate else [module.up]
            else:
                continue
            for part, output in zip(parts, site.slices, strict=True):
                end = output.start + output.size * output.stride
                for e in range(site.num_experts):
                    part_delta = dense(part, e, output.size, site.in_features)
                    result[e, output.start : end : output.stride] = part_delta
        elif target.site is site:
            assert isinstance(module, Factors)
            delta = module.scale * module.b[0].float() @ module.a[0].float()
            is_embedding = isinstance(target, EmbeddingTarget)
            result = delta.t().unsqueeze(2) if is_embedding else delta.unsqueeze(0)
    return result


def stored_delta(site: LoraSite, table: SiteTable, slot: int, expert: int) -> torch.Tensor:
    """Dense delta [out, in] float32 that the arena holds: reads by the SiteTable's contract."""
    result = torch.zeros(site.out_features, site.in_features)
    rank = int(table.rank[slot])
    if rank == 0:
        return result
    start = int(table.a_offset[slot]) + expert * int(table.a_stride[slot])
    a = table.arena[start : start + rank * site.in_features].view(rank, -1).float().cpu()
    for i, output in enumerate(site.slices):
        r, column = int(table.slice_rank[i, slot]), int(table.slice_column[i, slot])
        if r:
            at = int(table.b_offset[i, slot]) + expert * int(table.b_stride[i, slot])
            b_t = table.arena[at : at + r * output.size].view(r, output.size).float().cpu()
            end = output.start + output.size * output.stride
            result[output.start : end : output.stride] = b_t.t() @ a[column : column + r]
    return result


class CountingBackend(TorchBackend):
    """The CPU's backend; its counts show what a layer asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.routes = 0
        self.applied: list[str] = []
        self.classic: list[str] = []

    def route(self, *args: Any) -> TorchRouting:
        self.routes += 1
        return super().route(*args)

    def apply(self, x: Any, y: Any, site: LoraSite, *args: Any) -> None:
        self.applied.append(site.name)
        super().apply(x, y, site, *args)

    def apply_per_adapter(self, x: Any, y: Any, site: LoraSite, *args: Any) -> None:
        self.classic.append(site.name)
        super().apply_per_adapter(x, y, site, *args)


def view_of(slots: list[int], logit_slots: list[int] | None = None) -> BatchView:
    """The view of a step with these slots."""
    rows = torch.tensor(slots)
    logits = rows if logit_slots is None else torch.tensor(logit_slots)
    return BatchView(rows, logits, tuple(sorted({slot for slot in slots if slot >= 0})))


def begin(state: LoraState, slots: list[int], logit_slots: list[int] | None = None) -> BatchView:
    """Set the view of a step on `state`."""
    view = view_of(slots, logit_slots)
    state.set_view(view)
    return view
