"""`rope_write` of many tokens whose queries, keys and values end their LoRA here: tiles of tokens.

With x = q + B[q, slot] h rounded to q's dtype, and so k and v, the formulas of rope_write.py:
  q_out[t], keys[cache_rows[t]] = the rotated heads of q and k;  values[cache_rows[t]] = v[t]
A program has some tokens and takes some heads of one of q, k, v in turn; angles and shrunk rows are
read once for all of them. Norms are as wide as a head.

| array | shape | holds |
|---|---|---|
| q, k, v | [T, heads * d] float | rows any stride apart |
| cos, sin | [T, >= R / 2 * step] float | columns adjacent; not read if R is 0 |
| cache_rows | [T] int64 | row of keys and values of each token; < 0: it has none |
| h, slots, arena, table | | of the `DenseDelta`, of a layer with the sites q, k and v |
| q_out | [T, Hq, d] in q's dtype | contiguous |
| keys, values | [rows, Hkv, d] float | changed in place; what is not finite goes in as 0 |
"""

import torch
import triton
import triton.language as tl

from vexpert.kernels.common import (
    ceil_div,
    pdl_options,
    pdl_release,
    pdl_wait,
)
from vexpert.kernels.dense_factors import DenseDelta
from vexpert.kernels.dense_tile_reader import (
    add_of_tile,
    rows_of_h,
    slots_of_tile,
    tile_options,
    tile_tensors,
)
from vexpert.kernels.launch import direct_launch
from vexpert.kernels.rms_norm import scale_rows
from vexpert.kernels.rope_arguments import Heads, Rope, head_arguments, head_options
from vexpert.kernels.rope_write import store_heads


def can_tile(heads: Heads) -> bool:
    """Whether a tile sees all that its norms are of."""
    return heads.q_norm is None or heads.q_norm.width == heads.width


@triton.jit
def _angles(
    cos, sin, row, exists, stride_cos,
    ROTARY: tl.constexpr, BLOCK_R: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """cos and sin [M, BLOCK_R] in float32; anything where nothing is rotated."""
    c, s = row, row
    if ROTARY > 0:
        pair = tl.arange(0, BLOCK_R)
        mask = exists[:, None] & (pair < ROTARY // 2)[None, :]
        at = row[:, None] * stride_cos + (pair * STEP)[None, :]
        c = tl.load(cos + at, mask=mask, other=0.0).to(tl.float32)
        s = tl.load(sin + at, mask=mask, other=0.0).to(tl.float32)
    return c, s


@triton.jit
def _rotate_tile(
    source, stride, target, target_row, stored, weight, c, s, eps, first_head, row, exists, slot,
    rows, site, h, num_rows, stride_h, arena, table, num_slots, cos_dtype: tl.constexpr,
    COUNT: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, ROTARY: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr, INTERLEAVED: tl.constexpr, NORM: tl.constexpr,
    FORM: tl.constexpr, CACHE: tl.constexpr, WIDTH: tl.constexpr, BLOCK_RANK: tl.constexpr,
    RANK_STEPS: tl.constexpr, PLANES: tl.constexpr, ALIGNMENT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Heads first_head ... + HEADS - 1 of a tile's tokens; rows of `target`: target_row [M]."""
    dtype: tl.constexpr = source.dtype.element_ty
    SIZE: tl.constexpr = COUNT * D
    pair = tl.arange(0, BLOCK_R)
    within = pair < ROTARY // 2
    first = pair * 2 if INTERLEAVED else pair
    second = first + 1 if INTERLEAVED else pair + ROTARY // 2
    rest = ROTARY + tl.arange(0, BLOCK_P)
    kept = rest < D
    w_first, w_second, w_rest = first, second, rest  # not read without a norm's weight
    if NORM and FORM != "plain":
        w_first = tl.load(weight + first, mask=within, other=0.0)
        w_second = tl.load(weight + second, mask=within, other=0.0)
        w_rest = tl.load(weight + rest, mask=kept, other=0.0)
    line = source + row[:, None] * stride
    out = target + target_row[:, None] * SIZE
    for head in range(first_head, tl.minimum(first_head + HEADS, COUNT)):
        start = head * D
        squares = tl.zeros((row.shape[0],), dtype=tl.float32)
        if ROTARY > 0:
            mask = exists[:, None] & within[None, :]
            a = tl.load(line + (start + first)[None, :], mask=mask, other=0.0).to(tl.float32)
            b = tl.load(line + (start + second)[None, :], mask=mask, other=0.0).to(tl.float32)
            a = add_of_tile(
                a, row, slot, rows, start + first, within, site, h, num_rows, stride_h,
                arena, table, num_slots, dtype, SIZE, WIDTH, BLOCK_RANK, RANK_STEPS, PLANES,
                ALIGNMENT, PRECISION,
            )  # fmt: skip
            b = add_of_tile(
                b, row, slot, rows, start + second, within, site, h, num_rows, stride_h,
                arena, table, num_slots, dtype, SIZE, WIDTH, BLOCK_RANK, RANK_STEPS, PLANES,
                ALIGNMENT, PRECISION,
            )  # fmt: skip
            squares += tl.sum(a * a, 1) + tl.sum(b * b, 1)
        if ROTARY < D:
            others = exists[:, None] & kept[None, :]
            x = tl.load(line + (start + rest)[None, :], mask=others, other=0.0).to(tl.float32)
            x = add_of_tile(
                x, row, slot, rows, start + rest, kept, site, h, num_rows, stride_h,
                arena, table, num_slots, dtype, SIZE, WIDTH, BLOCK_RANK, RANK_STEPS, PLANES,
                ALIGNMENT, PRECISION,
            )  # fmt: skip
            squares += tl.sum(x * x, 1)
        if NORM:
            factor = tl.rsqrt(squares / D + eps)[:, None]
            if ROTARY > 0:
                a = scale_rows(a * factor, w_first[None, :], FORM, dtype).to(tl.float32)
                b = scale_rows(b * factor, w_second[None, :], FORM, dtype).to(tl.float32)
            if ROTARY < D:
                x = scale_rows(x * factor, w_rest[None, :], FORM, dtype).to(tl.float32)
        if ROTARY > 0:
            put = stored[:, None] & within[None, :]
            ac = (a * c).to(cos_dtype).to(tl.float32)
            bs = (b * s).to(cos_dtype).to(tl.float32)
            bc = (b * c).to(cos_dtype).to(tl.float32)
            as_ = (a * s).to(cos_dtype).to(tl.float32)
            rotated = (ac - bs).to(dtype).to(tl.float32)
            store_heads(out + (start + first)[None, :], rotated, put, CACHE)
            rotated = (bc + as_).to(dtype).to(tl.float32)
            store_heads(out + (start + second)[None, :], rotated, put, CACHE)
        if ROTARY < D:
            put = stored[:, None] & kept[None, :]
            store_heads(out + (start + rest)[None, :], x, put, CACHE)


@direct_launch
@triton.jit(do_not_specialize=["num_rows"])
def _rope_tile_kernel(
    q, k, v, q_weight, k_weight, cos, sin, cache_rows, q_out, keys, values, stride_q, stride_k,
    stride_v, stride_cos, q_eps, k_eps, h, slots, arena, table, num_rows, num_slots, site_step,
    stride_h,
    NUM_Q: tl.constexpr, NUM_KV: tl.constexpr, HEADS: tl.constexpr, TOKENS: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROTARY: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr, INTERLEAVED: tl.constexpr, STEP: tl.constexpr, NORM: tl.constexpr,
    Q_FORM: tl.constexpr, K_FORM: tl.constexpr, WIDTH: tl.constexpr, BLOCK_RANK: tl.constexpr,
    RANK_STEPS: tl.constexpr, PLANES: tl.constexpr, ALIGNMENT: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    Q_PROGRAMS: tl.constexpr = (NUM_Q + HEADS - 1) // HEADS
    KV_PROGRAMS: tl.constexpr = (NUM_KV + HEADS - 1) // HEADS
    PARTS: tl.constexpr = Q_PROGRAMS + 2 * KV_PROGRAMS
    cos_dtype: tl.constexpr = cos.dtype.element_ty
    pdl_release(PDL)
    part = tl.program_id(0) % PARTS
    row = (tl.program_id(0) // PARTS * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    exists = row < num_rows
    site = tl.where(part < Q_PROGRAMS, 0, tl.where(part < Q_PROGRAMS + KV_PROGRAMS, 1, 2))
    # Before the wait: nothing that runs beside this kernel writes slots, tables and factors.
    table += site.to(tl.int64) * site_step
    slot = slots_of_tile(row, exists, slots, table)
    pdl_wait(PDL)
    rows = rows_of_h(
        h, row, slot, site, num_rows, stride_h, arena, WIDTH, BLOCK_RANK, RANK_STEPS, PLANES
    )
    if part < Q_PROGRAMS:
        c, s = _angles(cos, sin, row, exists, stride_cos, ROTARY, BLOCK_R, STEP)
        _rotate_tile(
            q, stride_q, q_out, row, exists, q_weight, c, s, q_eps, part * HEADS, row, exists,
            slot, rows, site, h, num_rows, stride_h, arena, table, num_slots, cos_dtype, NUM_Q,
            HEADS, D, ROTARY, BLOCK_R, BLOCK_P, INTERLEAVED, NORM, Q_FORM, False, WIDTH,
            BLOCK_RANK, RANK_STEPS, PLANES, ALIGNMENT, PRECISION,
        )  # fmt: skip
    else:
        place = tl.load(cache_rows + row, mask=exists, other=-1).to(tl.int64)
        if part < Q_PROGRAMS + KV_PROGRAMS:
            c, s = _angles(cos, sin, row, exists, stride_cos, ROTARY, BLOCK_R, STEP)
            _rotate_tile(
                k, stride_k, keys, place, place >= 0, k_weight, c, s, k_eps,
                (part - Q_PROGRAMS) * HEADS, row, exists, slot, rows, site, h, num_rows, stride_h,
                arena, table, num_slots, cos_dtype, NUM_KV, HEADS, D, ROTARY, BLOCK_R, BLOCK_P,
                INTERLEAVED, NORM, K_FORM, True, WIDTH, BLOCK_RANK, RANK_STEPS, PLANES, ALIGNMENT,
                PRECISION,
            )  # fmt: skip
        else:
            _rotate_tile(
                v, stride_v, values, place, place >= 0, k_weight, row, row, k_eps,
                (part - Q_PROGRAMS - KV_PROGRAMS) * HEADS, row, exists, slot, rows, site, h,
                num_rows, stride_h, arena, table, num_slots, cos_dtype, NUM_KV, HEADS, D, 0,
                BLOCK_R, BLOCK_D, INTERLEAVED, False, K_FORM, True, WIDTH, BLOCK_RANK, RANK_STEPS,
                PLANES, ALIGNMENT, PRECISION,
            )  # fmt: skip


def rope_tiles(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    heads: Heads,
    rope: Rope,
    angles: tuple[torch.Tensor, torch.Tensor],
    cache_rows: torch.Tensor,
    cache: tuple[torch.Tensor, torch.Tensor],
    rest: DenseDelta,
    pdl: bool = False,
) -> torch.Tensor:
    """q_out [T, Hq, d], new; `cache`: (keys, values), changed in place. `angles`: (cos, sin).

    `rest` has a tile, and `can_tile(heads)`. References: `ops.reference.packed_linear` and
    `kernels.rope_write.reference_rotate`.
    """
    tile, tokens = rest.tile, q.shape[0]
    assert tile is not None
    assert can_tile(heads), heads
    q_out, arguments = head_arguments((q, k, v), heads, angles, cache_rows, cache)
    if tokens == 0:
        return q_out
    programs = ceil_div(heads.num_q, tile.heads) + 2 * ceil_div(heads.num_kv, tile.heads)
    _rope_tile_kernel[(ceil_div(tokens, tile.rows) * programs,)](
        *arguments,
        *tile_tensors(rest),
        HEADS=tile.heads,
        TOKENS=tile.rows,
        NORM=heads.q_norm is not None,
        **head_options(heads, rope, least=16),
        **tile_options(rest),
        num_warps=tile.num_warps,
        **pdl_options(pdl),
    )
    return q_out
