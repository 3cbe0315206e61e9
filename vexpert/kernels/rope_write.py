"""Per-head norm, rotary embedding and cache write of a step's queries, keys and values, in one.

For token t and each head of q and k, x = its d elements, normed first if there is a norm:
  a, b = x[FIRST(i)], x[SECOND(i)]                         i < R / 2, R the rotary width
  x[FIRST(i)]  = a * cos[t, i * step] - b * sin[t, i * step]
  x[SECOND(i)] = b * cos[t, i * step] + a * sin[t, i * step]
halves: FIRST(i) = i, SECOND(i) = i + R / 2; interleaved: 2 i and 2 i + 1. Elements from R on stay.
Products are rounded to the dtype of cos, as PyTorch does it, where the compiler does not contract
them with the sum.

| array | shape | holds |
|---|---|---|
| q, k, v | [T, heads * d] float | rows any stride apart: parts of one packed product, or three |
| cos, sin | [T, >= R / 2 * step] float | columns adjacent; not read if R is 0 |
| cache_rows | [T] int64 | row of keys and values of each token; < 0: it has none |
| q_out | [T, Hq, d] in q's dtype | contiguous |
| keys, values | [rows, Hkv, d] float | changed in place; what is not finite goes in as 0 |

With a `DenseDelta`, q, k and v are first q + B[q, slot] h, and so on, rounded to their dtype:
adapters of the packed product that made them. Base rows stay as they are. For tiles of tokens see
rope_tiles.py.
"""

import torch
import triton
import triton.language as tl

from vexpert.kernels.common import (
    ceil_div,
    pdl_options,
    pdl_release,
    pdl_wait,
    power_of_two,
    touch,
)
from vexpert.kernels.dense_factors import DenseDelta
from vexpert.kernels.dense_reader import rest_options, rest_tensors, shrunk_row
from vexpert.kernels.launch import direct_launch
from vexpert.kernels.norms import Norm, reference_rms_norm
from vexpert.kernels.rms_norm import scale_rows
from vexpert.kernels.rope_arguments import Heads, Rope, head_arguments, head_options


@triton.jit
def _load(
    source, column, mask, h, arena, rank, b_at, plane,
    LORA: tl.constexpr, SIZE: tl.constexpr, BLOCK_R: tl.constexpr, STEPS: tl.constexpr,
    PLANES: tl.constexpr, ALIGNMENT: tl.constexpr,
):  # fmt: skip
    """Elements [heads, n] in float32, with what the token's adapter adds."""
    dtype: tl.constexpr = source.dtype.element_ty
    x = tl.load(source + column, mask=mask, other=0.0).to(tl.float32)
    if LORA:  # noqa: SIM102 - what Triton decides when it compiles, and what it does not
        if rank > 0:
            for step in tl.static_range(STEPS):
                r = step * BLOCK_R + tl.arange(0, BLOCK_R)
                value = shrunk_row(h, rank, plane, step, BLOCK_R, PLANES, arena.dtype.element_ty)
                # Divided and multiplied: so the compiler knows what they are multiples of.
                start = b_at // ALIGNMENT * ALIGNMENT
                at = arena + start + r[:, None, None] * SIZE + column[None, :, :]
                b = tl.load(at, mask=(r < rank)[:, None, None] & mask[None, :, :], other=0.0)
                x += tl.sum(value[:, None, None] * b.to(tl.float32), 0)
            x = x.to(dtype).to(tl.float32)
    return x


@triton.jit
def _scale(x, mask, factor, weight, column, FORM: tl.constexpr, dtype: tl.constexpr):
    """x [heads, n] normed, in float32; `column`: of the weight."""
    w = column
    if FORM != "plain":
        w = tl.load(weight + column, mask=mask, other=0.0)
    return scale_rows(x * factor, w, FORM, dtype).to(tl.float32)


@triton.jit
def _finite(x):
    """x, and 0 where it is NaN or infinite."""
    return tl.where(tl.abs(x) < float("inf"), x, 0.0)


@triton.jit
def store_heads(at, x, mask, CACHE: tl.constexpr):
    if CACHE:
        x = _finite(x)
    tl.store(at, x.to(at.dtype.element_ty), mask=mask)


@triton.jit
def _rotate_heads(
    source,
    target,
    weight,
    cos,
    sin,
    eps,
    first_head,
    row,
    h,
    arena,
    rank,
    b_at,
    plane,
    HEADS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    D: tl.constexpr,
    ROTARY: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    STEP: tl.constexpr,
    NORM: tl.constexpr,
    FORM: tl.constexpr,
    CACHE: tl.constexpr,
    LORA: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    RANK_STEPS: tl.constexpr,
    PLANES: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    """Heads first_head ... + BLOCK_H - 1 of one token; source and target point at its head 0.

    Nothing is stored if row < 0.
    """
    cos_dtype: tl.constexpr = cos.dtype.element_ty
    dtype: tl.constexpr = source.dtype.element_ty
    head = (first_head + tl.arange(0, BLOCK_H))[:, None]
    exists = head < HEADS
    written = exists & (row + 0 * head >= 0)
    line = 0 * head  # where the weight of a head starts
    squares = tl.zeros((BLOCK_H,), dtype=tl.float32)
    if ROTARY > 0:
        HALF: tl.constexpr = ROTARY // 2
        pair = tl.arange(0, BLOCK_R)[None, :]
        within = pair < HALF
        if INTERLEAVED:
            first = 2 * pair
            second = 2 * pair + 1
        else:
            first = pair
            second = pair + HALF
        mask = exists & within
        c = tl.load(cos + pair * STEP, mask=within, other=0.0).to(tl.float32)
        s = tl.load(sin + pair * STEP, mask=within, other=0.0).to(tl.float32)
        a = _load(
            source, head * D + first, mask, h, arena, rank, b_at, plane, LORA, HEADS * D,
            BLOCK_RANK, RANK_STEPS, PLANES, ALIGNMENT,
        )  # fmt: skip
        b = _load(
            source, head * D + second, mask, h, arena, rank, b_at, plane, LORA, HEADS * D,
            BLOCK_RANK, RANK_STEPS, PLANES, ALIGNMENT,
        )  # fmt: skip
        squares += tl.sum(a * a, 1) + tl.sum(b * b, 1)
    if ROTARY < D:
        rest = ROTARY + tl.arange(0, BLOCK_P)[None, :]
        kept = exists & (rest < D)
        x = _load(
            source, head * D + rest, kept, h, arena, rank, b_at, plane, LORA, HEADS * D,
            BLOCK_RANK, RANK_STEPS, PLANES, ALIGNMENT,
        )  # fmt: skip
        squares += tl.sum(x * x, 1)
    if NORM != "none":
        if NORM == "all":
            factor = tl.rsqrt(tl.sum(squares, 0) / (HEADS * D) + eps)
            line = head * D
        else:
            factor = tl.rsqrt(squares / D + eps)[:, None]
        if ROTARY > 0:
            a = _scale(a, mask, factor, weight, line + first, FORM, dtype)
            b = _scale(b, mask, factor, weight, line + second, FORM, dtype)
        if ROTARY < D:
            x = _scale(x, kept, factor, weight, line + rest, FORM, dtype)
    if ROTARY > 0:
        ac = (a * c).to(cos_dtype).to(tl.float32)
        bs = (b * s).to(cos_dtype).to(tl.float32)
        bc = (b * c).to(cos_dtype).to(tl.float32)
        as_ = (a * s).to(cos_dtype).to(tl.float32)
        store_heads(
            target + head * D + first, (ac - bs).to(dtype).to(tl.float32), mask & written, CACHE
        )
        store_heads(
            target + head * D + second, (bc + as_).to(dtype).to(tl.float32), mask & written, CACHE
        )
    if ROTARY < D:
        store_heads(target + head * D + rest, x, kept & written, CACHE)


@triton.jit
def _touch(
    b, first, rank, size, COLUMNS: tl.constexpr, BLOCK_RANK: tl.constexpr
):  # fmt: skip
    """Bring COLUMNS columns of the first rows of B^T to the L1."""
    LINE: tl.constexpr = 1024 // b.dtype.element_ty.primitive_bitwidth
    LINES: tl.constexpr = (COLUMNS + LINE - 1) // LINE
    i = tl.arange(0, BLOCK_RANK * LINES)
    r = tl.minimum(i // LINES, tl.maximum(rank - 1, 0))
    touch(b + r * size + first + i % LINES * LINE)


@direct_launch
@triton.jit
def _rope_write_kernel(
    q,
    k,
    v,
    q_weight,
    k_weight,
    cos,
    sin,
    cache_rows,
    q_out,
    keys,
    values,
    stride_q,
    stride_k,
    stride_v,
    stride_cos,
    q_eps,
    k_eps,
    h,
    slots,
    arena,
    table,
    num_slots,
    site_step,
    stride_h,
    plane,
    NUM_Q: tl.constexpr,
    NUM_KV: tl.constexpr,
    Q_BLOCK: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROTARY: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    STEP: tl.constexpr,
    NORM: tl.constexpr,
    Q_FORM: tl.constexpr,
    K_FORM: tl.constexpr,
    LORA: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    RANK_STEPS: tl.constexpr,
    PLANES: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    PDL: tl.constexpr,
):
    Q_PROGRAMS: tl.constexpr = (NUM_Q + Q_BLOCK - 1) // Q_BLOCK
    KV_PROGRAMS: tl.constexpr = (NUM_KV + KV_BLOCK - 1) // KV_BLOCK
    pdl_release(PDL)
    part = tl.program_id(0) % (Q_PROGRAMS + 2 * KV_PROGRAMS)
    token = (tl.program_id(0) // (Q_PROGRAMS + 2 * KV_PROGRAMS)).to(tl.int64)
    rank, b_at = 0, 0
    if LORA:
        # Nothing that runs beside this kernel writes slots, tables and factors.
        site = tl.where(part < Q_PROGRAMS, 0, tl.where(part < Q_PROGRAMS + KV_PROGRAMS, 1, 2))
        slot = tl.load(slots + token)
        cell = table + site * site_step + slot
        rank = tl.load(cell, mask=slot >= 0, other=0).to(tl.int32)
        b_at = tl.load(cell + 5 * num_slots, mask=slot >= 0, other=0)
        h += token * stride_h + site * WIDTH
    if LORA and PDL:
        if part < Q_PROGRAMS:
            _touch(arena + b_at, part * Q_BLOCK * D, rank, NUM_Q * D, Q_BLOCK * D, BLOCK_RANK)
        else:
            first = (part - Q_PROGRAMS) % KV_PROGRAMS * KV_BLOCK
            _touch(arena + b_at, first * D, rank, NUM_KV * D, KV_BLOCK * D, BLOCK_RANK)
    pdl_wait(PDL)
    cos += token * stride_cos
    sin += token * stride_cos
    if part < Q_PROGRAMS:
        _rotate_heads(
            q + token * stride_q, q_out + token * NUM_Q * D, q_weight, cos, sin, q_eps,
            part * Q_BLOCK, token, h, arena, rank, b_at, plane, NUM_Q, Q_BLOCK, D, ROTARY, BLOCK_R,
            BLOCK_P, INTERLEAVED, STEP, NORM, Q_FORM, False, LORA, BLOCK_RANK, RANK_STEPS, PLANES,
            ALIGNMENT,
        )  # fmt: skip
    else:
        row = tl.load(cache_rows + token).to(tl.int64)
        if part < Q_PROGRAMS + KV_PROGRAMS:
            _rotate_heads(
                k + token * stride_k, keys + row * NUM_KV * D, k_weight, cos, sin, k_eps,
                (part - Q_PROGRAMS) * KV_BLOCK, row, h, arena, rank, b_at, plane, NUM_KV, KV_BLOCK,
                D, ROTARY, BLOCK_R, BLOCK_P, INTERLEAVED, STEP, NORM, K_FORM, True, LORA,
                BLOCK_RANK, RANK_STEPS, PLANES, ALIGNMENT,
            )  # fmt: skip
        else:
            _rotate_heads(
                v + token * stride_v, values + row * NUM_KV * D, k_weight, cos, sin, k_eps,
                (part - Q_PROGRAMS - KV_PROGRAMS) * KV_BLOCK, row, h, arena, rank, b_at, plane,
                NUM_KV, KV_BLOCK, D, 0, BLOCK_R, BLOCK_D, INTERLEAVED, STEP, "none", K_FORM, True,
                LORA, BLOCK_RANK, RANK_STEPS, PLANES, ALIGNMENT,
            )  # fmt: skip


def _head_blocks(heads: Heads, tokens: int, has_lora: bool) -> tuple[int, int, str]:
    """Heads of q and of k of one program, and the kind of norm."""
    norm, block_d = heads.q_norm, power_of_two(heads.width, 16, 1024)
    if norm is not None and norm.width != heads.width:
        return power_of_two(heads.num_q, 1, 512), power_of_two(heads.num_kv, 1, 512), "all"
    # Few tokens: a head a program, for their number; many: 1024 elements, for their size. The
    # interpreter runs one program after another.
    few = tokens <= 32 and not triton.knobs.runtime.interpret
    alone = few and not heads.batch_invariant
    most = 1 if alone else max(1, (256 if has_lora else 1024) // block_d)
    q_block, kv_block = (power_of_two(count, 1, most) for count in (heads.num_q, heads.num_kv))
    return q_block, kv_block, "none" if norm is None else "head"


def rope_write(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    heads: Heads,
    rope: Rope,
    angles: tuple[torch.Tensor, torch.Tensor],
    cache_rows: torch.Tensor,
    cache: tuple[torch.Tensor, torch.Tensor],
    pdl: bool = False,
    rest: DenseDelta | None = None,
) -> torch.Tensor:
    """q_out [T, Hq, d], new; `cache`: (keys, values), changed in place. `angles`: (cos, sin).

    `rest`: what is still to add to q, k and v. Reference: `reference_rotate`.
    """
    tokens, d = q.shape[0], heads.width
    q_out, arguments = head_arguments((q, k, v), heads, angles, cache_rows, cache)
    if tokens == 0:
        return q_out
    q_block, kv_block, norm = _head_blocks(heads, tokens, rest is not None)
    programs = ceil_div(heads.num_q, q_block) + 2 * ceil_div(heads.num_kv, kv_block)
    _rope_write_kernel[(tokens * programs,)](
        *arguments,
        *rest_tensors(rest, q),
        Q_BLOCK=q_block,
        KV_BLOCK=kv_block,
        NORM=norm,
        **head_options(heads, rope, least=1),
        **rest_options(rest, d),
        num_warps=power_of_two(q_block * d // 256, 1, 8),
        **pdl_options(pdl),
    )
    return q_out


def reference_rotate(
    x: torch.Tensor,
    norm: Norm | None,
    rope: Rope,
    angles: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """Normed and rotated heads [T, heads, d] of x [T, heads, d], in PyTorch."""
    tokens, heads, d = x.shape
    if norm is not None:
        x = reference_rms_norm(x.reshape(tokens, -1, norm.width), norm).view(tokens, heads, d)
    if rope.width == 0:
        return x
    half = rope.width // 2
    cos, sin = (part[:, None, : half * rope.step : rope.step] for part in angles)
    pair = torch.arange(half)
    first, second = (2 * pair, 2 * pair + 1) if rope.interleaved else (pair, pair + half)
    a, b = x[..., first], x[..., second]
    out = x.clone()
    out[..., first] = (a * cos - b * sin).to(x.dtype)
    out[..., second] = (b * cos + a * sin).to(x.dtype)
    return out
