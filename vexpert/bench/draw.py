"""A step's rows: hidden states, routed experts and slots, drawn at random for one case."""

import zlib
from dataclasses import dataclass

import torch

from vexpert.bench.cases import Case
from vexpert.bench.shapes import find_shape

ZIPF = 1.5  # the i-th most popular has a share in proportion to i ** -ZIPF


@dataclass(frozen=True)
class Draw:
    """Inputs of one layer at one step, on the device."""

    hidden: torch.Tensor  # [T, H] in the layer's dtype
    topk_ids: torch.Tensor  # [T, K] int64
    topk_weights: torch.Tensor  # [T, K], hidden's dtype; each row sums to 1
    slots: torch.Tensor  # [T] int64, -1: base
    active_slots: tuple[int, ...]  # distinct slots >= 0, ascending

    def rows(self, index: torch.Tensor) -> "Draw":
        """The step of tokens `index` [N] alone."""
        slots = self.slots[index]
        return Draw(
            self.hidden[index],
            self.topk_ids[index],
            self.topk_weights[index],
            slots,
            distinct_slots(slots),
        )


def distinct_slots(slots: torch.Tensor) -> tuple[int, ...]:
    """Those of slots [T] that are adapters'."""
    return tuple(sorted({slot for slot in slots.tolist() if slot >= 0}))


def _generator(*key: object) -> torch.Generator:
    """Its stream depends on `key` alone: equal parts of two cases draw alike."""
    return torch.Generator().manual_seed(zlib.crc32(repr(key).encode()))


def _shares(popularity: str, count: int, generator: torch.Generator) -> torch.Tensor:
    """Probability of each of `count` items [count]; which is how popular is random."""
    shares = torch.ones(count)
    if popularity == "zipf":
        shares = torch.arange(1, count + 1) ** -ZIPF
    return (shares / shares.sum())[torch.randperm(count, generator=generator)]


def draw_experts(case: Case) -> torch.Tensor:
    """Distinct experts of each token [T, K] int64; the same for all adapters and base shares."""
    shape = find_shape(case.shape)
    generator = _generator("experts", case.seed, case.tokens, case.expert_popularity)
    shares = _shares(case.expert_popularity, shape.experts, generator)
    if case.expert_popularity == "identical":
        return torch.randperm(shape.experts, generator=generator)[: shape.top_k].repeat(
            case.tokens, 1
        )
    rows = shares.expand(case.tokens, -1)
    return torch.multinomial(rows, shape.top_k, generator=generator)


def draw_slots(case: Case) -> torch.Tensor:
    """Slot of each token [T] int64; exactly `case.base_rows` of them, anywhere, are -1.

    More slots rename the adapters, and change nothing else.
    """
    key = (case.seed, case.tokens, case.adapters, case.base_share, case.popularity)
    generator = _generator("slots", *key)
    adapted = case.tokens - case.base_rows
    if case.popularity == "identical":
        chosen = torch.zeros(adapted, dtype=torch.int64)
    elif case.popularity == "distinct":
        chosen = torch.arange(adapted) % case.adapters
    else:
        shares = _shares(case.popularity, case.adapters, generator)
        chosen = torch.multinomial(shares, adapted, replacement=True, generator=generator)
    slots = torch.full((case.tokens,), -1)
    where = torch.randperm(case.tokens, generator=generator)[:adapted]
    slots[where] = torch.randperm(case.slots, generator=generator)[: case.adapters][chosen]
    return slots


def draw(case: Case, device: torch.device, dtype: torch.dtype) -> Draw:
    """Everything of one case."""
    shape = find_shape(case.shape)
    generator = _generator("values", case.seed, case.tokens)
    weights = torch.rand(case.tokens, shape.top_k, generator=generator) + 0.1
    hidden = torch.randn(case.tokens, shape.hidden, generator=generator)
    slots = draw_slots(case)
    kept = slots >= 0 if case.adapter_rows_only else torch.ones_like(slots, dtype=torch.bool)
    return Draw(
        hidden=hidden[kept].to(device, dtype),
        topk_ids=draw_experts(case)[kept].to(device),
        topk_weights=(weights / weights.sum(1, keepdim=True))[kept].to(device, dtype),
        slots=slots[kept].to(device),
        active_slots=distinct_slots(slots),
    )
