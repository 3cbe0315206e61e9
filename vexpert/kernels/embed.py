"""The head of a step in one launch: rows of an embedding, the norm of them, and rotary angles.

  hidden[t] = table[tokens[t]]
  normed[t] = norm of hidden[t], by the forms of norms.py; float32 inside
  cos, sin    as in rope_angles.py, if angles are asked for

| array | shape | holds |
|---|---|---|
| tokens, positions | [T] int64 | |
| table | [V, W] float | rows any stride apart |
| hidden, normed | [T, W] in the table's dtype | contiguous |
| cos, sin | [T, R] in the angles' dtype | contiguous |
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from vexpert.kernels.common import check_matrix, pdl_options, pdl_release, pdl_wait, power_of_two
from vexpert.kernels.launch import direct_launch
from vexpert.kernels.norms import MAX_WIDTH, Norm
from vexpert.kernels.rms_norm import scale_rows
from vexpert.kernels.rope_angles import Angles, store_angles


class Embedded(NamedTuple):
    """What a step begins with."""

    hidden: torch.Tensor  # [T, W] in the table's dtype
    normed: torch.Tensor  # [T, W] in the table's dtype
    angles: tuple[torch.Tensor, torch.Tensor] | None  # cos, sin [T, R] in the angles' dtype


@direct_launch
@triton.jit
def _embed_kernel(
    tokens,
    table,
    norm_weight,
    hidden,
    normed,
    positions,
    frequencies,
    cos,
    sin,
    stride_table,
    eps,
    scaling,
    WIDTH: tl.constexpr,
    FORM: tl.constexpr,
    BLOCK_W: tl.constexpr,
    ANGLES: tl.constexpr,
    F: tl.constexpr,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
    LAYOUT: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK_W)[None, :]
    inside = column < WIDTH
    w = column  # not read without a norm's weight
    if FORM != "plain":
        w = tl.load(norm_weight + column, mask=inside, other=0.0)
    pdl_release(PDL)
    pdl_wait(PDL)
    raw = tl.load(table + tl.load(tokens + row) * stride_table + column, mask=inside, other=0.0)
    tl.store(hidden + row * WIDTH + column, raw, mask=inside)
    if ANGLES:
        store_angles(row, positions, frequencies, cos, sin, scaling, F, R, BLOCK, LAYOUT)
    value = raw.to(tl.float32)
    factor = tl.rsqrt(tl.sum(value * value, 1) / WIDTH + eps)
    y = scale_rows(value * factor[:, None], w, FORM, normed.dtype.element_ty)
    tl.store(normed + row * WIDTH + column, y, mask=inside)


def embed(
    tokens: torch.Tensor,
    table: torch.Tensor,
    norm: Norm,
    positions: torch.Tensor | None = None,
    angles: Angles | None = None,
    pdl: bool = False,
) -> Embedded:
    """hidden, normed and angles of `tokens` [T], every one of the table's, 0 ... V - 1.

    W is the norm's width, at most MAX_WIDTH. Positions go with angles. References:
    `kernels.norms.reference_rms_norm` and `kernels.rope_angles.reference_rope_angles`.
    """
    check_matrix("table", table)
    count, width = tokens.shape[0], table.shape[1]
    assert width == norm.width <= MAX_WIDTH, (tuple(table.shape), norm.width)
    assert tokens.is_contiguous(), tokens.stride()
    assert (positions is None) == (angles is None), (positions, angles)
    hidden = torch.empty(count, width, dtype=table.dtype, device=table.device)
    normed = torch.empty_like(hidden)
    cos = sin = hidden  # not written without angles
    options: dict[str, int | str] = {"F": 1, "R": 1, "BLOCK": 1, "LAYOUT": "once"}
    if angles is not None and positions is not None:
        assert positions.shape == tokens.shape, (positions.shape, tokens.shape)
        assert positions.is_contiguous(), positions.stride()
        cos = torch.empty(count, angles.width, dtype=angles.dtype, device=table.device)
        sin = torch.empty_like(cos)
        options = angles.options()
    if count:
        block = power_of_two(width, 16, MAX_WIDTH)
        _embed_kernel[(count,)](
            tokens, table, table if norm.weight is None else norm.weight, hidden, normed,
            tokens if positions is None else positions,
            table if angles is None else angles.frequencies, cos, sin, table.stride(0), norm.eps,
            1.0 if angles is None else angles.scaling,
            WIDTH=width, FORM=norm.form, BLOCK_W=block, ANGLES=angles is not None, **options,
            num_warps=power_of_two(block // 256, 1, 8), **pdl_options(pdl),
        )  # fmt: skip
    return Embedded(hidden, normed, None if angles is None else (cos, sin))
