"""Steps over a paged cache whose unused rows are NaN, and how far an output is from the truth."""

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from vexpert.kernels.paged_types import AttentionBatch
from vexpert.ops.attention import reference_attention, reference_latent_attention


@dataclass(frozen=True)
class Case:
    """Inputs of one call."""

    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    batch: AttentionBatch
    options: dict[str, Any] = field(default_factory=dict)  # scaling, window, chunk, softcap, sinks
    rotary: torch.Tensor | None = None  # of latent attention

    @property
    def width(self) -> int:
        """Columns of a head of the output."""
        return (self.values if self.rotary is None else self.keys).shape[2]

    def expected(self, **changes: Any) -> torch.Tensor:
        """By the reference, in float64; rows behind the last sequence are zeros."""
        out = self.query.new_zeros(*self.query.shape[:2], self.width)
        options = {**self.options, **changes, "out": out.double()}
        rest = self.keys, self.values, self.batch
        if self.rotary is None:
            return reference_attention(self.query, *rest, **options)
        return reference_latent_attention(self.query, self.rotary, *rest, **options)


@dataclass(frozen=True)
class Sizes:
    """Heads of a case, and the blocks of its cache."""

    kv_heads: int = 2
    group: int = 3
    d: int = 12
    dv: int = 12
    block_size: int = 4
    spare_rows: int = 0  # query rows behind the last sequence


def make_case(
    lens: list[tuple[int, int]],
    sizes: Sizes | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
    sinks: bool = False,
    **options: Any,
) -> Case:
    """`lens`: (query rows, keys) of each sequence. Heads are columns of a wider tensor, as in
    a fused qkv product; blocks are shuffled; tables are longer than needed."""
    sizes = sizes or Sizes()
    random = torch.Generator().manual_seed(seed)
    size, width = sizes.block_size, max(-(-kv // sizes.block_size) for _, kv in lens) + 2
    ids = torch.randperm(len(lens) * width, generator=random).view(len(lens), width)
    heads = sizes.kv_heads * sizes.group
    rows = sum(q for q, _ in lens) + sizes.spare_rows
    fused = torch.randn(rows, heads * sizes.d + 16, generator=random)
    query = fused.to(device, dtype)[:, : heads * sizes.d].view(rows, heads, sizes.d)
    keys = torch.full((ids.numel() * size, sizes.kv_heads, sizes.d), float("nan"))
    values = torch.full((ids.numel() * size, sizes.kv_heads, sizes.dv), float("nan"))
    for own, (_, length) in zip(ids, lens, strict=True):
        at = (own[:, None] * size + torch.arange(size)).flatten()[:length]
        keys[at] = torch.randn(length, *keys.shape[1:], generator=random)
        values[at] = torch.randn(length, *values.shape[1:], generator=random)
    queries = torch.tensor([0] + [q for q, _ in lens])
    batch = AttentionBatch(
        query_starts=queries.cumsum(0).to(device),
        kv_lens=torch.tensor([kv for _, kv in lens], device=device),
        block_tables=ids.to(device),
        block_size=size,
        max_query_len=int(queries.max()),
        max_kv_len=max(kv for _, kv in lens),
    )
    options = {"scaling": sizes.d**-0.5 * 1.5, **options}
    if sinks:
        options["sinks"] = torch.randn(heads, generator=random).to(device, dtype)
    return Case(query, keys.to(device, dtype), values.to(device, dtype), batch, options)


def make_latent_case(
    lens: list[tuple[int, int]],
    heads: int = 3,
    rank: int = 24,
    rotary: int = 8,
    block_size: int = 4,
    spare_rows: int = 0,
    **given: Any,
) -> Case:
    """As `make_case`, of latent attention: the keys' parts lie side by side in one cache, and the
    query's second part behind columns that are not its own."""
    sizes = Sizes(1, heads, rank + rotary, 1, block_size, spare_rows)
    case = make_case(lens, sizes, **given)
    parts = [rank, rotary]
    keys, values = torch.split(case.keys, parts, 2)
    query, second = torch.split(case.query, parts, 2)
    return replace(case, query=query, keys=keys, values=values, rotary=second)


def worst_row_error(out: torch.Tensor, want: torch.Tensor) -> float:
    """The largest ||out - want|| / ||want|| of any token and head; NaN where out has one."""
    difference = (out.double() - want.double()).norm(dim=-1)
    return float((difference / want.double().norm(dim=-1).clamp(min=1e-3)).max())


def moved(case: Case, seed: int) -> Case:
    """The same cache contents in other blocks, with the same tensors' shapes."""
    random = torch.Generator().manual_seed(seed)
    tables = case.batch.block_tables
    size = case.batch.block_size
    order = torch.randperm(tables.numel(), generator=random).to(tables.device)
    rows = (order[:, None] * size + torch.arange(size, device=tables.device)).flatten()
    keys, values = torch.empty_like(case.keys), torch.empty_like(case.values)
    keys[rows], values[rows] = case.keys, case.values
    batch = replace(case.batch, block_tables=order[tables])
    return replace(case, keys=keys, values=values, batch=batch)
