"""Steps that decode and prefill over a paged cache share: load keys, make scores, fold them in.

For a tile of queries [M] and a block of keys j, with peak and total [M], acc [M, dv] so far:
  s = cap(scaling * q . k) * log2(e), -inf where j is hidden;  peak' = max(peak, max_j s)
  total' = total * 2^(peak - peak') + sum_j 2^(s - peak');   acc' likewise, with the values
Exponents have base 2: scores are multiplied by log2(e) once, and `exp2` is one instruction.

In latent attention (DR > 0) keys have two parts, and the first is the value as well:
  score(query, j) = query . keys[j] + rotary . values[j];  out = sum_j softmax_j(score) keys[j]

| array | shape | holds |
|---|---|---|
| table | [W] int64 | a sequence's row of `AttentionBatch.block_tables` |
| cache | [rows, Hkv, d or dv] float | keys, or values |
"""

import torch
import triton
import triton.language as tl

from vexpert.kernels.common import power_of_two
from vexpert.kernels.paged_types import PagedShape

# Of these Triton would compile a kernel for each kind of value: in the middle of serving.
INDEX_ARRAYS = ["query_starts", "kv_lens", "block_tables"]
UNSPECIALIZED = [
    "sequences",
    "width",
    "window",
    "chunk",
    "stride_table",
    "least_len",
    "min_keys",
    "splits",
    "num_rows",
]
LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def load_blocks(table, j, width, BLOCK_SIZE: tl.constexpr):
    """Blocks of positions j; behind the table's end those of its last place, which are not used.

    Not masked by the sequence's length, so that the load need not wait until that is known. A loop
    loads the blocks of its next step: their addresses are then known in time for its prefetch.
    """
    return tl.load(table + tl.minimum(j // BLOCK_SIZE, width - 1)).to(tl.int32)


@triton.jit
def load_rows(
    cache, rows, inside, head_at, stride_row, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """[len(rows), BLOCK] of `cache`: one head of these rows, zeros outside.

    What lies outside may be NaN, and zero times NaN is NaN.
    """
    column = tl.arange(0, BLOCK)
    at = cache + rows.to(tl.int64)[:, None] * stride_row + head_at + column[None, :]
    wanted = inside[:, None]
    if WIDTH != BLOCK:
        wanted &= (column < WIDTH)[None, :]
    return tl.load(at, mask=wanted, other=0.0)


@triton.jit
def load_queries(line, head, mine, stride_h, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """[len(head), BLOCK] of the queries at `line`: one token's, or one for each head."""
    column = tl.arange(0, BLOCK)
    at = line + head[:, None] * stride_h + column[None, :]
    return tl.load(at, mask=mine[:, None] & (column < WIDTH)[None, :], other=0.0)


@triton.jit
def load_values(
    key, values, row, inside, g, stride_vr, stride_vh,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, DR: tl.constexpr, BLOCK_DR: tl.constexpr,
):  # fmt: skip
    """(values of the keys, second part of the keys); each is one of the two tiles at hand."""
    if DR > 0:
        return key, load_rows(values, row, inside, g * stride_vh, stride_vr, DR, BLOCK_DR)
    else:  # noqa: RET505 - Triton would compile what stands behind a return
        value = load_rows(values, row, inside, g * stride_vh, stride_vr, DV, BLOCK_DV)
        return value, value


@triton.jit
def multiply(q, q_rotary, key, key_rotary, DR: tl.constexpr, PRECISION: tl.constexpr):
    """Products of queries and keys, [M, N] float32."""
    products = tl.dot(q, tl.trans(key), input_precision=PRECISION)
    if DR > 0:
        products = tl.dot(q_rotary, tl.trans(key_rotary), products, input_precision=PRECISION)
    return products


@triton.jit
def cap_scores(products, scale, softcap, HAS_SOFTCAP: tl.constexpr):
    """Scores in base 2."""
    if HAS_SOFTCAP:
        # tanh from exp: finite for all x, and off by 1e-7 of the cap at most
        doubled = tl.exp2(products * (scale / softcap * 2 * LOG2E))
        scores = (1.0 - 2.0 / (doubled + 1.0)) * (softcap * LOG2E)
    else:
        scores = products * scale
    return scores


@triton.jit
def fold(scores, value, peak, total, acc, MAY_BE_EMPTY: tl.constexpr, PRECISION: tl.constexpr):
    """One step of the online softmax: new peak and total [M], acc [M, dv] float32."""
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    shift = new_peak
    if MAY_BE_EMPTY:
        shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    weights = tl.exp2(scores - shift[:, None])
    factor = tl.exp2(peak - shift)
    total = total * factor + tl.sum(weights, 1)
    acc = acc * factor[:, None]
    acc = tl.dot(weights.to(value.dtype), value, acc, input_precision=PRECISION)
    return new_peak, total, acc


def rotary_arguments(
    sizes: PagedShape, query: torch.Tensor, rotary: torch.Tensor | None
) -> dict[str, torch.Tensor | int]:
    """The kernels' arguments of the second part of the query; without one the first stands in."""
    part = query if rotary is None else rotary
    return {
        "rotary": part,
        "stride_rt": part.stride(0),
        "stride_rh": part.stride(1),
        "DR": sizes.rotary,
        "BLOCK_DR": power_of_two(sizes.rotary, 16, 1024),
    }
