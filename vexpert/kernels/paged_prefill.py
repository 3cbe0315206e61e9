"""Attention of chunks of queries over a paged cache, decodes among them: any mix of lengths.

For sequence b, its query rows t = query_starts[b] + i and query head h of KV head g:
  out[t, h]  = sum_j softmax_j(score(query[t, h], keys[row(j), g])) values[row(j), g]
over the keys j <= kv_len - query_len + i that count (`Scores`); row(j) as in `paged_decode`.

A tile is BLOCK_Q queries of one sequence, each with HEADS heads of one KV head: row m is query
m / HEADS, head m % HEADS. So keys are loaded once for all these heads, and few queries meet a
diagonal. Sequence b has the tiles query_starts[b] / BLOCK_Q + b up to the next sequence's first;
those without queries end at once. Nothing of this is asked of the host.

| array | shape | holds |
|---|---|---|
| query | [T, Hq, d] float | any strides of rows and heads |
| keys, values | [rows, Hkv, d or dv] in query's dtype | the cache; latent: both parts of the keys |
| query_starts, kv_lens, block_tables | | see `AttentionBatch` |
| sinks | [Hq] float, or None | see `Scores` |
| out | [T, Hq, dv] in query's dtype | any strides of rows and heads |
| rotary | [T, Hq, dr] in query's dtype, or None | latent: second part of the query |
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from vexpert.kernels.common import (
    ceil_div,
    dot_precision,
    pdl_options,
    pdl_release,
    pdl_wait,
    power_of_two,
)
from vexpert.kernels.launch import direct_launch
from vexpert.kernels.paged_tiles import (
    INDEX_ARRAYS,
    LOG2E,
    UNSPECIALIZED,
    cap_scores,
    fold,
    load_blocks,
    load_queries,
    load_rows,
    load_values,
    multiply,
    rotary_arguments,
)
from vexpert.kernels.paged_types import AttentionBatch, PagedShape, Scores


@dataclass(frozen=True)
class PrefillShape:
    """Rows and keys of a tile, and how Triton runs it."""

    block_m: int
    block_n: int
    num_warps: int = 8
    num_stages: int = 3
    pdl: bool = False
    registers: int | None = None  # of a thread, at most: so that two programs fit where one would


@triton.jit
def _find_sequence(query_starts, sequences, tile, BLOCK_Q: tl.constexpr, BLOCK_B: tl.constexpr):
    """The last sequence whose first tile is not behind `tile`."""
    before = 0
    for first in range(0, sequences, BLOCK_B):
        b = first + tl.arange(0, BLOCK_B)
        start = tl.load(query_starts + b, mask=b < sequences, other=0)
        opens = (start // BLOCK_Q + b <= tile) & (b < sequences)
        before += tl.sum(opens.to(tl.int32), 0)
    return before - 1


@triton.jit
def _hide(
    scores, j, position, window, chunk, HAS_WINDOW: tl.constexpr, HAS_CHUNK: tl.constexpr
):  # fmt: skip
    """Minus infinity where position [M] does not see key j [N]."""
    seen = j[None, :] <= position[:, None]
    if HAS_WINDOW:
        seen &= j[None, :] > position[:, None] - window
    if HAS_CHUNK:
        seen &= j[None, :] // chunk == position[:, None] // chunk
    return tl.where(seen, scores, float("-inf"))


@direct_launch
@triton.jit(do_not_specialize=UNSPECIALIZED, do_not_specialize_on_alignment=INDEX_ARRAYS)
def _prefill_kernel(
    query, keys, values, query_starts, kv_lens, block_tables, sinks, out, sequences, width, scale,
    softcap, window, chunk, stride_qt, stride_qh, stride_kr, stride_kh, stride_vr, stride_vh,
    stride_table, stride_ot, stride_oh, least_len, rotary, stride_rt, stride_rh,
    HAS_WINDOW: tl.constexpr, HAS_CHUNK: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr, GROUP_SIZE: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, HEADS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_B: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr, DR: tl.constexpr, BLOCK_DR: tl.constexpr,
):  # fmt: skip
    pdl_wait(PDL)
    block_q: tl.constexpr = BLOCK_M // HEADS
    parts: tl.constexpr = (GROUP_SIZE + HEADS - 1) // HEADS
    g = tl.program_id(0) // parts
    # the last tiles of a sequence have the most keys: they start first
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    b = _find_sequence(query_starts, sequences, tile, block_q, BLOCK_B)
    start = tl.load(query_starts + b)
    query_len = (tl.load(query_starts + b + 1) - start).to(tl.int32)
    first_query = (tile - (start // block_q + b)).to(tl.int32) * block_q
    if (first_query >= query_len) | (query_len < least_len):
        return
    kv_len = tl.load(kv_lens + b).to(tl.int32)

    m = tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_DV)
    h = tl.program_id(0) % parts * HEADS + m % HEADS
    i = first_query + m // HEADS
    mine = (m < block_q * HEADS) & (i < query_len) & (h < GROUP_SIZE)
    # rows that are not stored see what the tile's first query sees
    position = kv_len - query_len + tl.where(mine, i, first_query)
    token = start + i
    head = g * GROUP_SIZE + h
    q = load_queries(query + token[:, None] * stride_qt, head, mine, stride_qh, D, BLOCK_D)
    q_rotary = q
    if DR > 0:
        its = rotary + token[:, None] * stride_rt
        q_rotary = load_queries(its, head, mine, stride_rh, DR, BLOCK_DR)

    first_position = kv_len - query_len + first_query
    left = 0
    if HAS_WINDOW:
        left = tl.maximum(left, first_position - window + 1)
    if HAS_CHUNK:
        left = tl.maximum(left, first_position // chunk * chunk)
    # Whole steps from the first key on: a query's sums do not depend on who shares its tile.
    left = left // BLOCK_N * BLOCK_N
    right = kv_len - query_len + tl.minimum(first_query + block_q, query_len)

    peak = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK_M,), dtype=tl.float32)
    if HAS_SINKS:
        sink = tl.load(sinks + head, mask=mine, other=0.0).to(tl.float32)
        peak = sink * LOG2E
        total += 1.0
    acc = tl.zeros((BLOCK_M, BLOCK_DV), dtype=tl.float32)
    table = block_tables + b.to(tl.int64) * stride_table
    n = tl.arange(0, BLOCK_N)
    block = load_blocks(table, left + n, width, BLOCK_SIZE)
    for first in range(left, right, BLOCK_N):
        j = first + n
        inside = j < right
        row = block * BLOCK_SIZE + j % BLOCK_SIZE
        block = load_blocks(table, j + BLOCK_N, width, BLOCK_SIZE)
        key = load_rows(keys, row, inside, g * stride_kh, stride_kr, D, BLOCK_D)
        value, key_rotary = load_values(
            key, values, row, inside, g, stride_vr, stride_vh, DV, BLOCK_DV, DR, BLOCK_DR
        )
        products = multiply(q, q_rotary, key, key_rotary, DR, PRECISION)
        scores = cap_scores(products, scale, softcap, HAS_SOFTCAP)
        hides = first + BLOCK_N > first_position + 1  # something of someone
        if HAS_WINDOW:
            hides |= first <= right - 1 - window
        if HAS_CHUNK:
            hides |= first // chunk != (right - 1) // chunk
        if hides:
            scores = _hide(scores, j, position, window, chunk, HAS_WINDOW, HAS_CHUNK)
        peak, total, acc = fold(scores, value, peak, total, acc, HAS_WINDOW or HAS_CHUNK, PRECISION)

    pdl_release(PDL)
    target = out + token[:, None] * stride_ot + head[:, None] * stride_oh + column[None, :]
    wanted = mine[:, None] & (column < DV)[None, :]
    tl.store(target, (acc / total[:, None]).to(out.dtype.element_ty), mask=wanted)


def paged_prefill(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    batch: AttentionBatch,
    how: Scores,
    out: torch.Tensor,
    shape: PrefillShape,
    least_len: int = 1,
    rotary: torch.Tensor | None = None,
) -> None:
    """Write, in place, the rows of `out` of sequences with at least `least_len` query rows.

    Other rows stay as they are. Columns are adjacent. References:
    `ops.attention_reference.reference_attention`,
    `ops.attention_reference.reference_latent_attention`.
    """
    sizes = PagedShape.of(query, keys, values, rotary)
    heads = min(sizes.group, shape.block_m)
    tiles = query.shape[0] // (shape.block_m // heads) + batch.num_sequences
    _prefill_kernel[(sizes.kv_heads * ceil_div(sizes.group, heads), tiles)](
        query, keys, values, batch.query_starts, batch.kv_lens, batch.block_tables,
        query if how.sinks is None else how.sinks, out, batch.num_sequences,
        batch.block_tables.shape[1],
        stride_qt=query.stride(0), stride_qh=query.stride(1), stride_kr=keys.stride(0),
        stride_kh=keys.stride(1), stride_vr=values.stride(0), stride_vh=values.stride(1),
        stride_table=batch.block_tables.stride(0), stride_ot=out.stride(0), stride_oh=out.stride(1),
        least_len=least_len, **rotary_arguments(sizes, query, rotary), **how.constants(),
        GROUP_SIZE=sizes.group, D=sizes.width,
        DV=sizes.value_width, BLOCK_SIZE=batch.block_size, HEADS=heads, BLOCK_M=shape.block_m,
        BLOCK_N=shape.block_n, BLOCK_D=power_of_two(sizes.width, 16, 1024),
        BLOCK_DV=power_of_two(sizes.value_width, 16, 1024), BLOCK_B=128,
        PRECISION=dot_precision(query.dtype), num_warps=shape.num_warps,
        num_stages=shape.num_stages, maxnreg=shape.registers, **pdl_options(shape.pdl),
    )  # fmt: skip
