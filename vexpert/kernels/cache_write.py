"""Write the step's keys and values to their cache rows, both in one launch.

For token t with row r = cache_rows[t] >= 0 and head g:
  keys[r, g] = finite(key[t, g]);  values[r, g] = finite(value[t, g])
finite(x) is x, or zero for NaN and infinities: what an adapter with broken weights computes must
not stay in a block, for its next owner may multiply rows that it has not written yet with zero.

| array | shape | holds |
|---|---|---|
| key, value | [T, Hkv, d or dv] float | any strides of tokens and heads |
| cache_rows | [T] int64 | negative: a padding row of a captured graph, not written |
| keys, values | [rows, Hkv, d or dv] float | the cache, changed in place |
"""

import torch
import triton
import triton.language as tl

from vexpert.kernels.common import pdl_options, pdl_release, pdl_wait, power_of_two
from vexpert.kernels.launch import direct_launch


@triton.jit
def _write_one(source, target, stride_sh, stride_th, COUNT: tl.constexpr, WIDTH: tl.constexpr,
               BLOCK: tl.constexpr):  # fmt: skip
    """COUNT elements: all heads of one token."""
    for first in tl.static_range(0, COUNT, BLOCK):
        i = first + tl.arange(0, BLOCK)
        inside = i < COUNT
        head, column = i // WIDTH, i % WIDTH
        x = tl.load(source + head * stride_sh + column, mask=inside, other=0.0)
        # false for NaN too
        x = tl.where(tl.abs(x.to(tl.float32)) < float("inf"), x, 0.0)
        tl.store(target + head * stride_th + column, x.to(target.dtype.element_ty), mask=inside)


@direct_launch
@triton.jit(do_not_specialize_on_alignment=["cache_rows"])  # else a variant for each
def _write_kernel(
    key, value, cache_rows, keys, values, stride_kt, stride_kh, stride_vt, stride_vh, stride_kr,
    stride_kg, stride_vr, stride_vg, HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_wait(PDL)
    pdl_release(PDL)
    token = tl.program_id(0).to(tl.int64)
    row = tl.load(cache_rows + token)
    if row < 0:
        return
    from_key, to_key = key + token * stride_kt, keys + row * stride_kr
    _write_one(from_key, to_key, stride_kh, stride_kg, HEADS * D, D, BLOCK_K)
    from_value, to_value = value + token * stride_vt, values + row * stride_vr
    _write_one(from_value, to_value, stride_vh, stride_vg, HEADS * DV, DV, BLOCK_V)


def write_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    cache_rows: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    pdl: bool = False,
) -> None:
    """Change the rows `cache_rows` [T] of keys and values in place; columns are adjacent.

    Every row is less than the cache has, and no two tokens have one. Reference:
    `reference_write_cache`.
    """
    for given, cache in ((key, keys), (value, values)):
        assert given.shape[1:] == cache.shape[1:], (tuple(given.shape), tuple(cache.shape))
        assert given.stride(2) == cache.stride(2) == 1, (given.stride(), cache.stride())
    tokens, heads, width = key.shape
    value_width = value.shape[2]
    _write_kernel[(tokens,)](
        key,
        value,
        cache_rows,
        keys,
        values,
        *key.stride()[:2],
        *value.stride()[:2],
        *keys.stride()[:2],
        *values.stride()[:2],
        HEADS=heads,
        D=width,
        DV=value_width,
        BLOCK_K=power_of_two(heads * width, 16, 1024),
        BLOCK_V=power_of_two(heads * value_width, 16, 1024),
        num_warps=4,
        **pdl_options(pdl),
    )


def reference_write_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    cache_rows: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> None:
    """The same, token by token."""
    for token, row in enumerate(cache_rows.tolist()):
        if row >= 0:
            keys[row] = torch.nan_to_num(key[token], nan=0.0, posinf=0.0, neginf=0.0)
            values[row] = torch.nan_to_num(value[token], nan=0.0, posinf=0.0, neginf=0.0)
