"""The cases that every path of the LoRA operations must pass, with the reason for each."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from helpers_lora import Case, SlotSpec, make_site, make_table

from vexpert.ops.backend import select_backend
from vexpert.ops.types import OutputSlice

HALVES = (OutputSlice(0, 48), OutputSlice(48, 48))  # gate, up
INTERLEAVED = (OutputSlice(0, 48, 2), OutputSlice(1, 48, 2))  # gpt-oss
UNEVEN = (OutputSlice(0, 32), OutputSlice(32, 8), OutputSlice(40, 24))  # like q, k, v
MIXED: tuple[SlotSpec | None, ...] = (
    SlotSpec((8, 8), one_shrink=True),
    SlotSpec((4, 12)),
    None,
    SlotSpec((16, 16)),
    SlotSpec((0, 5)),
    SlotSpec((1, 3)),
)


@dataclass(frozen=True)
class Shape:
    """Sizes and slots of one case."""

    reason: str
    tokens: int = 9
    top_k: int = 2
    experts: int = 6  # 0: a dense layer
    hidden: int = 40
    slices: tuple[OutputSlice, ...] = HALVES
    specs: tuple[SlotSpec | None, ...] = MIXED
    max_lora_rank: int = 16
    base_share: float = 0.3  # of the tokens
    sentinel_share: float = 0.0  # of the pairs
    choose: Callable[[int, int, int], torch.Tensor] | None = None  # tokens, top_k, experts -> ids
    align: int = 1
    out_features: int | None = None  # None: the last column that a slice writes


def one_expert(tokens: int, top_k: int, experts: int) -> torch.Tensor:
    return torch.full((tokens, top_k), experts - 1)


def few_experts(tokens: int, top_k: int, experts: int) -> torch.Tensor:
    return torch.randint(0, 2, (tokens, top_k)) * (experts - 1)


def grid() -> dict[str, Shape]:
    shapes = {}
    for tokens, top_k, experts, rank in itertools.product((32, 64), (1, 2), (8, 20), (8, 16)):
        specs = (SlotSpec((rank, rank)), SlotSpec((rank // 2, rank // 2)), SlotSpec((rank, rank)))
        shapes[f"t{tokens}-k{top_k}-e{experts}-r{rank}"] = Shape(
            "the grid", tokens, top_k, experts, specs=specs, align=48
        )
    return shapes


SINGLE = (OutputSlice(0, 40),)
DENSE = tuple(SlotSpec((rank,)) for rank in (8, 1, 16))
SHAPES: dict[str, Shape] = grid() | {
    "mixed": Shape("ranks, targets, an empty slot, a shared shrink and base rows in one batch"),
    "odd-ranks": Shape(
        "ranks that no tile divides",
        specs=tuple(SlotSpec((rank, rank)) for rank in (1, 3, 5, 12, 100)),
        max_lora_rank=100,
    ),
    "sentinels": Shape("experts of other ranks, on both sides", sentinel_share=0.4),
    "all-sentinels": Shape("nothing to do", sentinel_share=1.0),
    "one-expert": Shape("one expert takes all: the longest segment", 80, choose=one_expert),
    "empty-experts": Shape("most experts have no row", 20, experts=20, choose=few_experts),
    "k1": Shape("one expert per token", top_k=1),
    "k-is-e": Shape("every token visits every expert", top_k=6),
    "shared-a": Shape("A common to all experts", specs=(SlotSpec((8, 8), shared_a=True),) * 3),
    "shared-b": Shape("B common to all experts", specs=(SlotSpec((8, 8), shared_b=True),) * 3),
    "gate-only": Shape("one slice of two", specs=(SlotSpec((8, 0)), SlotSpec((0, 8)))),
    "no-target": Shape("active slots that do not adapt this site", specs=(None, None)),
    "base-only": Shape("no row has an adapter", base_share=1.0),
    "no-base": Shape("every row has one", base_share=0.0),
    "no-tokens": Shape("an empty step", tokens=0),
    "one-token": Shape("decode of one request", tokens=1, base_share=0.0),
    "one-slot": Shape("one adapter", specs=(SlotSpec((8, 8), one_shrink=True),), base_share=0.0),
    "alike": Shape(
        "equal ranks, rows that line up: the shortest way",
        specs=(SlotSpec((8, 8)),) * 3,
        base_share=0.0,
        align=48,
    ),
    "odd-sizes": Shape(
        "nothing is a multiple of anything",
        tokens=7,
        hidden=37,
        slices=(OutputSlice(0, 19), OutputSlice(19, 19)),
    ),
    "deep": Shape("an inner dimension that is split", tokens=3, hidden=1100, base_share=0.0),
    "wide": Shape(
        "more columns than one tile", slices=(OutputSlice(0, 150), OutputSlice(150, 150))
    ),
    "interleaved": Shape("gate and up alternate", slices=INTERLEAVED),
    "uneven-slices": Shape("q, k, v", experts=0, slices=UNEVEN, specs=(SlotSpec((8, 4, 2)),) * 2),
    "partial-output": Shape(
        "columns that no slice writes", slices=(OutputSlice(8, 16),), specs=DENSE, out_features=30
    ),
    "dense": Shape("a Linear", experts=0, slices=SINGLE, specs=DENSE),
    "dense-one-slot": Shape(
        "a Linear, one adapter for all", experts=0, slices=SINGLE, specs=DENSE[:1], base_share=0.0
    ),
    "dense-prefill": Shape("a long prompt", 120, experts=0, slices=SINGLE, specs=DENSE),
    "embedding": Shape(
        "one column of A per token id",
        experts=50,
        hidden=1,
        top_k=1,
        slices=SINGLE,
        specs=tuple(SlotSpec((rank,), shared_b=True) for rank in (8, 3)),
    ),
    "many-virtual": Shape(
        "64 slots x 512 experts, all alike: too many for a table of indices",
        tokens=6,
        experts=512,
        hidden=16,
        slices=(OutputSlice(0, 16),),
        specs=(SlotSpec((1,)),) * 64,
        max_lora_rank=1,
        base_share=0.0,
        align=16,
    ),
}


def make_case(
    name: str, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0
) -> Case:
    """Case `name` with random signed data."""
    shape = SHAPES[name]
    torch.manual_seed(seed)
    site = make_site(
        max(shape.experts, 1), shape.hidden, shape.slices, shape.max_lora_rank, shape.out_features
    )
    table = make_table(site, list(shape.specs), dtype, device, seed, shape.align)
    slots = torch.randint(0, len(shape.specs), (shape.tokens,))
    slots[torch.rand(shape.tokens) < shape.base_share] = -1
    x = torch.randn(shape.tokens, shape.hidden).to(device, dtype)
    if not shape.experts:
        return Case(site, table, x, slots.to(device), None, None)
    ids = torch.rand(shape.tokens, shape.experts).argsort(1)[:, : shape.top_k]
    if shape.choose is not None:
        ids = shape.choose(shape.tokens, shape.top_k, shape.experts)
    lost = torch.rand(ids.shape) < shape.sentinel_share
    ids[lost] = torch.where(torch.rand(ids.shape) < 0.5, -1, shape.experts + 3)[lost]
    token = torch.arange(shape.tokens).repeat_interleave(shape.top_k)
    return Case(
        site, table, x, slots[token].to(device), ids.reshape(-1).to(device), token.to(device)
    )


def zeros_for(case: Case) -> torch.Tensor:
    """An output of zeros [P, out]."""
    rows = case.slots.shape[0]
    return torch.zeros(rows, case.site.out_features, dtype=case.x.dtype, device=case.x.device)


def run(path: str, case: Case, y: torch.Tensor) -> None:
    """Add the delta to y in place by `path`: a backend, or a backend and "-classic"."""
    name, _, classic = path.partition("-")
    backend = select_backend(name, case.x.device, case.x.dtype)
    if classic:
        backend.apply_per_adapter(
            case.x,
            y,
            case.site,
            case.table,
            case.slots,
            case.experts,
            case.active_slots,
            case.x_rows,
        )
        return
    routing = backend.route(case.slots, case.experts, case.site.num_experts, case.num_slots)
    backend.apply(case.x, y, case.site, case.table, routing, case.x_rows)
