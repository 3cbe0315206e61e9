"""Attention of one query a sequence over a paged cache, its keys split among programs.

For each sequence b with one query row, query head h of KV head g, and the keys j that count
(`Scores`):
  out[t, h]  = sum_j softmax_j(score(query[t, h], keys[row(j), g])) values[row(j), g]
  t = query_starts[b];  row(j) = block_tables[b, j / block_size] * block_size + j % block_size

A program takes a run of keys of one sequence and KV head, for all its query heads at once: they
are the rows of its dots. How many runs a sequence has follows from its own length, on the device,
up to S. A sequence of one run is done there and then. Otherwise the program that arrives last
adds the runs up, in their order, whoever it is: the result is the same every time.

| array | shape | holds |
|---|---|---|
| query | [T, Hq, d] float | any strides of rows and heads |
| keys, values | [rows, Hkv, d or dv] in query's dtype | the cache; latent: both parts of the keys |
| query_starts, kv_lens, block_tables | | see `AttentionBatch` |
| sinks | [Hq] float, or None | see `Scores` |
| out | [T, Hq, dv] in query's dtype | any strides of rows and heads |
| rotary | [T, Hq, dr] in query's dtype, or None | latent: second part of the query |
| part_out | [B, Hq, S, dv] float32 | a run's sum of weighted values, not yet divided |
| part_peak, part_total | [B, Hq, S] float32 | its largest score (base 2), its sum of weights |
| arrivals | [B * groups] int32 | runs done; zero before and after |
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
class DecodeShape:
    """Keys of a program's step and run, and how Triton runs it."""

    block_n: int
    min_keys: int  # of a run, if a sequence is split at all
    programs: int  # that fill the device: splits are made up to that many
    num_warps: int = 4
    num_stages: int = 3
    pdl: bool = False


MOST_SPLITS = 64
EARLY_ROWS = 2  # the product that follows so few rows loads its weights meanwhile: it may start


def count_splits(shape: DecodeShape, programs: int, most_keys: int) -> int:
    """Runs of a sequence at most, where `programs` run without splitting."""
    by_room = -(-shape.programs // programs)
    return max(1, min(by_room, -(-most_keys // shape.min_keys), MOST_SPLITS))


@triton.jit
def _add_up(
    out, part_out, part_peak, part_total, row, first_row, heads_left, used, stride_h,
    splits, DV: tl.constexpr, BLOCK_S: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Out of ROWS heads from their runs, in order; `row`: of the first in the parts."""
    head = tl.arange(0, ROWS)
    mine = head < heads_left
    column = tl.arange(0, BLOCK_DV)
    every = tl.arange(0, BLOCK_S)
    all_at = (row + head[None, :]) * splits + every[:, None]
    exist = mine[None, :] & (every < used)[:, None]
    peaks = tl.load(part_peak + all_at, mask=exist, other=float("-inf"), cache_modifier=".cg")
    peak = tl.max(peaks, 0)
    peak = tl.where(peak == float("-inf"), 0.0, peak)
    totals = tl.load(part_total + all_at, mask=exist, other=0.0, cache_modifier=".cg")
    total = tl.sum(totals * tl.exp2(peaks - peak[None, :]), 0)
    sums = tl.zeros((GROUP, ROWS, BLOCK_DV), dtype=tl.float32)  # one sum at the end: no barriers
    for first in range(0, used, GROUP):
        split = first + tl.arange(0, GROUP)
        at = (row + head[None, :]) * splits + split[:, None]
        there = mine[None, :] & (split < used)[:, None]
        cell = at.to(tl.int64)[:, :, None] * DV + column[None, None, :]
        within = there[:, :, None] & (column < DV)[None, None, :]
        part = tl.load(part_out + cell, mask=within, other=0.0, cache_modifier=".cg")
        weight = tl.load(part_peak + at, mask=there, other=float("-inf"), cache_modifier=".cg")
        weight = tl.exp2(weight - peak[None, :])
        sums += part * weight[:, :, None]
    acc = tl.sum(sums, 0) / tl.where(mine, total, 1.0)[:, None]
    target = out + first_row + head[:, None] * stride_h + column[None, :]
    filled = mine[:, None] & (column < DV)[None, :]
    tl.store(target, acc.to(out.dtype.element_ty), mask=filled)


@direct_launch
@triton.jit(do_not_specialize=UNSPECIALIZED, do_not_specialize_on_alignment=INDEX_ARRAYS)
def _decode_kernel(
    query, keys, values, query_starts, kv_lens, block_tables, sinks, out, part_out, part_peak,
    part_total, arrivals, width, scale, softcap, window, chunk, stride_qt, stride_qh, stride_kr,
    stride_kh, stride_vr, stride_vh, stride_table, stride_ot, stride_oh, min_keys,
    splits, num_rows, rotary, stride_rt, stride_rh,
    HAS_WINDOW: tl.constexpr, HAS_CHUNK: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr, GROUP_SIZE: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, IS_SPLIT: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_H: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr,
    GROUP: tl.constexpr, PRECISION: tl.constexpr, RELEASE: tl.constexpr, PDL: tl.constexpr,
    DR: tl.constexpr, BLOCK_DR: tl.constexpr,
):  # fmt: skip
    pdl_release(PDL and RELEASE)
    pdl_wait(PDL)
    parts: tl.constexpr = (GROUP_SIZE + BLOCK_H - 1) // BLOCK_H
    b, split = tl.program_id(1), tl.program_id(2)
    g = tl.program_id(0) // parts
    first_head = g * GROUP_SIZE + tl.program_id(0) % parts * BLOCK_H
    heads_left = (g + 1) * GROUP_SIZE - first_head
    token = tl.load(query_starts + b)
    next_token = tl.load(query_starts + b + 1)
    kv_len = tl.load(kv_lens + b).to(tl.int32)
    if next_token - token != 1:
        # Padding of a graph: what its row holds is computed with, so it must be a number, and the
        # same for all such rows, which then go to the same experts.
        if (split == 0) & (b >= tl.load(query_starts + tl.num_programs(1))) & (b < num_rows):
            h = tl.arange(0, BLOCK_H)[:, None]
            column = tl.arange(0, BLOCK_DV)[None, :]
            row = out + b.to(tl.int64) * stride_ot + (first_head + h) * stride_oh + column
            zero = tl.zeros((BLOCK_H, BLOCK_DV), dtype=out.dtype.element_ty)
            tl.store(row, zero, mask=(h < heads_left) & (column < DV))
        return
    left = 0
    if HAS_WINDOW:
        left = tl.maximum(left, kv_len - window)
    if HAS_CHUNK:
        left = tl.maximum(left, (kv_len - 1) // chunk * chunk)
    # as many runs as there are programs at most, of at least min_keys, and of whole steps
    used = tl.minimum(tl.cdiv(kv_len - left, min_keys), splits)
    run = tl.cdiv(tl.cdiv(kv_len - left, used), BLOCK_N) * BLOCK_N
    used = tl.cdiv(kv_len - left, run)
    if split >= used:
        return
    begin = left + split * run
    end = tl.minimum(begin + run, kv_len)

    h = tl.arange(0, BLOCK_H)
    column = tl.arange(0, BLOCK_DV)
    n = tl.arange(0, BLOCK_N)
    mine = h < heads_left
    q = load_queries(query + token * stride_qt, first_head + h, mine, stride_qh, D, BLOCK_D)
    q_rotary = q
    if DR > 0:
        its = rotary + token * stride_rt
        q_rotary = load_queries(its, first_head + h, mine, stride_rh, DR, BLOCK_DR)
    peak = tl.full((BLOCK_H,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK_H,), dtype=tl.float32)
    if HAS_SINKS:
        sink = tl.load(sinks + first_head + h, mask=mine, other=0.0).to(tl.float32)
        peak = tl.where(split == 0, sink * LOG2E, float("-inf"))  # it counts once
        total += tl.where(split == 0, 1.0, 0.0)
    acc = tl.zeros((BLOCK_H, BLOCK_DV), dtype=tl.float32)
    table = block_tables + b.to(tl.int64) * stride_table
    block = load_blocks(table, begin + n, width, BLOCK_SIZE)
    for first in range(begin, end, BLOCK_N):
        j = first + n
        inside = j < end
        row = block * BLOCK_SIZE + j % BLOCK_SIZE
        block = load_blocks(table, j + BLOCK_N, width, BLOCK_SIZE)
        key = load_rows(keys, row, inside, g * stride_kh, stride_kr, D, BLOCK_D)
        value, key_rotary = load_values(
            key, values, row, inside, g, stride_vr, stride_vh, DV, BLOCK_DV, DR, BLOCK_DR
        )
        products = multiply(q, q_rotary, key, key_rotary, DR, PRECISION)
        scores = cap_scores(products, scale, softcap, HAS_SOFTCAP)
        scores = tl.where(inside[None, :], scores, float("-inf"))
        peak, total, acc = fold(scores, value, peak, total, acc, False, PRECISION)

    pdl_release(PDL and not RELEASE)
    wanted = mine[:, None] & (column < DV)[None, :]
    if used == 1:
        target = out + token * stride_ot + (first_head + h)[:, None] * stride_oh + column[None, :]
        tl.store(target, (acc / total[:, None]).to(out.dtype.element_ty), mask=wanted)
    elif IS_SPLIT:
        line = b * tl.num_programs(0) // parts * GROUP_SIZE + first_head
        at = (line + h) * splits + split
        tl.store(part_out + at.to(tl.int64)[:, None] * DV + column[None, :], acc, mask=wanted)
        tl.store(part_peak + at, peak, mask=mine)
        tl.store(part_total + at, total, mask=mine)
        tl.debug_barrier()  # one thread announces what all of them have written
        arrival = arrivals + b * tl.num_programs(0) + tl.program_id(0)
        if tl.atomic_add(arrival, 1, sem="acq_rel") == used - 1:
            first_row = token * stride_ot + first_head * stride_oh
            _add_up(
                out, part_out, part_peak, part_total, line, first_row, heads_left, used,
                stride_oh, splits, DV, BLOCK_S, GROUP, ROWS, BLOCK_DV,
            )  # fmt: skip
            tl.store(arrival, 0)


def _parts(
    splits: int, batch: AttentionBatch, programs: int, out: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """part_out, part_peak, part_total and arrivals; without splits they are never touched."""
    if splits == 1:
        return (out,) * 4
    lead = (batch.num_sequences, out.shape[1], splits)
    part_out = out.new_empty(*lead, out.shape[2], dtype=torch.float32)
    part_peak, part_total = out.new_empty(2, *lead, dtype=torch.float32)
    return part_out, part_peak, part_total, batch.arrivals(programs)


def programs_of(kv_heads: int, group: int) -> int:
    """Of each sequence and split; `group`: query heads of a KV head."""
    return kv_heads * ceil_div(group, power_of_two(group, 16, 64))


def paged_decode(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    batch: AttentionBatch,
    how: Scores,
    out: torch.Tensor,
    shape: DecodeShape,
    rotary: torch.Tensor | None = None,
) -> None:
    """Write, in place, the row of `out` [T, Hq, dv] of every sequence that has one query row.

    Other rows stay as they are. Columns are adjacent. References:
    `ops.attention_reference.reference_attention`,
    `ops.attention_reference.reference_latent_attention`.
    """
    sizes = PagedShape.of(query, keys, values, rotary)
    block_h = power_of_two(sizes.group, 16, 64)
    programs = programs_of(sizes.kv_heads, sizes.group)
    most_keys = how.most_keys(batch.max_kv_len)
    splits = count_splits(shape, programs * batch.num_sequences, most_keys)
    block_dv = power_of_two(sizes.value_width, 16, 1024)
    rows = power_of_two(sizes.group, 1, block_h)
    # [GROUP, ROWS, BLOCK_DV] float32 lie in registers
    together = max(1, min(8, 64 * 32 * shape.num_warps // (rows * block_dv)))
    _decode_kernel[(programs, batch.num_sequences, splits)](
        query, keys, values, batch.query_starts, batch.kv_lens, batch.block_tables,
        query if how.sinks is None else how.sinks, out, *_parts(splits, batch, programs, out),
        batch.block_tables.shape[1],
        stride_qt=query.stride(0), stride_qh=query.stride(1), stride_kr=keys.stride(0),
        stride_kh=keys.stride(1), stride_vr=values.stride(0), stride_vh=values.stride(1),
        stride_table=batch.block_tables.stride(0), stride_ot=out.stride(0), stride_oh=out.stride(1),
        min_keys=shape.min_keys, **rotary_arguments(sizes, query, rotary), **how.constants(),
        GROUP_SIZE=sizes.group, D=sizes.width,
        DV=sizes.value_width, BLOCK_SIZE=batch.block_size, splits=splits, num_rows=out.shape[0],
        IS_SPLIT=splits > 1, BLOCK_S=MOST_SPLITS, BLOCK_H=block_h, ROWS=rows,
        BLOCK_D=power_of_two(sizes.width, 16, 1024), BLOCK_DV=block_dv, BLOCK_N=shape.block_n,
        GROUP=together, PRECISION=dot_precision(query.dtype), RELEASE=out.shape[0] <= EARLY_ROWS,
        num_warps=shape.num_warps, num_stages=shape.num_stages, **pdl_options(shape.pdl),
    )  # fmt: skip
