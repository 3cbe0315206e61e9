"""Applies what adapters have beyond factors, adapter by adapter, to their own rows alone."""

from collections.abc import Sequence

import torch

from vexpert.lora.layers.groups import RowGroups
from vexpert.lora.site_extras import SiteExtra
from vexpert.ops.float32_linear import linear


def apply_extras(
    extras: Sequence[tuple[int, SiteExtra]],
    groups: RowGroups,
    x: torch.Tensor,
    y: torch.Tensor,
    x_rows: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> None:
    """Change in place the rows of y [R, out] whose slot is in `extras`, deltas already added.

    x [R or fewer, in], `x_rows` [R]: rows of x; `bias` [out]: what the base adds. All other rows
    stay as they are, bit for bit.
    """
    for slot, extra in extras:
        rows = groups.rows_of(slot)
        experts = None if groups.experts is None else groups.experts[rows]
        out = y[rows]
        if extra.weight is not None or extra.token_ids is not None:
            if experts is not None:
                out = _look_up(extra, experts, out)
            else:
                out = _multiply(extra, x[rows if x_rows is None else x_rows[rows]], out, bias)
        y.index_copy_(0, rows, _scale(extra, experts, out))


def _look_up(extra: SiteExtra, ids: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Embedding: rows [m, dim] of the tokens `ids` [m]."""
    if extra.weight is not None:
        out = extra.weight[ids].to(out.dtype)
    if extra.token_ids is not None:
        assert extra.token_rows is not None
        at = torch.searchsorted(extra.token_ids, ids).clamp_(max=extra.token_ids.shape[0] - 1)
        hit = extra.token_ids[at] == ids
        out = torch.where(hit[:, None], extra.token_rows[at].to(out.dtype), out)
    return out


def _multiply(
    extra: SiteExtra, x: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Linear: outputs [m, out] of x [m, in] by the adapter's own weight or rows of it."""
    if extra.weight is not None:
        out = _linear(x, extra.weight, bias, out.dtype)
    if extra.token_ids is not None:
        assert extra.token_rows is not None
        own = None if bias is None else bias[extra.token_ids]
        out[:, extra.token_ids] = _linear(x, extra.token_rows, own, out.dtype)
    return out


def _linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """x W^T + b in x's dtype, then in `dtype`; where that is float32, sums are not rounded."""
    out_dtype = torch.float32 if dtype == torch.float32 else None
    return linear(x, weight.to(x.dtype), bias, out_dtype).to(dtype)


def _scale(extra: SiteExtra, experts: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
    """gain * out + shift in float32, back in the dtype of `out`."""
    if extra.gain is None and extra.shift is None:
        return out
    wide = out.float()
    if extra.gain is not None:
        wide = wide * _of_rows(extra.gain, experts)
    if extra.shift is not None:
        wide = wide + _of_rows(extra.shift, experts)
    return wide.to(out.dtype)


def _of_rows(values: torch.Tensor, experts: torch.Tensor | None) -> torch.Tensor:
    """Rows [m, out] of values [E or 1, out]; a sentinel expert's row is never read further."""
    if experts is None or values.shape[0] == 1:
        return values
    return values[experts.clamp(0, values.shape[0] - 1)]
