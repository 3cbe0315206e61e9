"""A small model's targets, random adapters and their dense deltas, and a slow backend."""

from dataclasses import dataclass, field

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


def tiny_targets() -> TargetMap:
    """One target of every kind."""
    builder = TargetBuilder()
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
    a = table.arena[start : start + rank * site.in_features].view(rank, -1).float()
    for i, output in enumerate(site.slices):
        r, column = int(table.slice_rank[i, slot]), int(table.slice_column[i, slot])
        if r:
            at = int(table.b_offset[i, slot]) + expert * int(table.b_stride[i, slot])
            b_t = table.arena[at : at + r * output.size].view(r, output.size).float()
            end = output.start + output.size * output.stride
            result[output.start : end : output.stride] = b_t.t() @ a[column : column + r]
    return result


@dataclass(frozen=True)
class RowList:
    """The reference backend's routing: the rows as they are."""

    slots: torch.Tensor
    experts: torch.Tensor | None
    num_experts: int


@dataclass
class ReferenceBackend:
    """One row at a time. Counts its calls, so that tests see what a layer asked for."""

    routes: int = 0
    applies: list[str] = field(default_factory=list)
    classic: list[str] = field(default_factory=list)

    def route(
        self, slots: torch.Tensor, experts: torch.Tensor | None, num_experts: int, num_slots: int
    ) -> RowList:
        assert int(slots.max()) < num_slots
        self.routes += 1
        return RowList(slots, experts, num_experts)

    def apply(
        self,
        x: torch.Tensor,
        y: torch.Tensor,
        site: LoraSite,
        table: SiteTable,
        routing: RowList,
        x_rows: torch.Tensor | None = None,
    ) -> None:
        assert x.dtype == y.dtype == table.arena.dtype
        assert routing.num_experts == site.num_experts
        assert len(routing.slots) == len(y), f"{len(y)} rows, but the step has {len(routing.slots)}"
        self.applies.append(site.name)
        for row, slot in enumerate(routing.slots.tolist()):
            expert = 0 if routing.experts is None else int(routing.experts[row])
            if slot < 0 or not 0 <= expert < site.num_experts:
                continue
            source = row if x_rows is None else int(x_rows[row])
            y[row] += (stored_delta(site, table, slot, expert) @ x[source].float()).to(y.dtype)

    def apply_per_adapter(
        self,
        x: torch.Tensor,
        y: torch.Tensor,
        site: LoraSite,
        table: SiteTable,
        slots: torch.Tensor,
        experts: torch.Tensor | None,
        active_slots: tuple[int, ...],
        x_rows: torch.Tensor | None = None,
    ) -> None:
        assert {slot for slot in slots.tolist() if slot >= 0} <= set(active_slots)
        self.classic.append(site.name)
        self.apply(x, y, site, table, RowList(slots, experts, site.num_experts), x_rows)


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
