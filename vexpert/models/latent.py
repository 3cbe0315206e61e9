"""Multi-head latent attention: which modules' latents are understood, and keeping them compressed.

A module is understood if its keys and values are what `kv_b_proj` makes of the cached latents, head
by head first the key's columns and then the value's, behind each key the cached rotary part, and
if a method `expand_kv` of its own does that.
"""

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from vexpert.errors import ModelError
from vexpert.kernels.dense_factors import HeadColumns
from vexpert.lora.layers import LatentLinear
from vexpert.models.fused_record import agree

Pair = tuple[torch.Tensor, torch.Tensor]


def find_columns(path: str, module: nn.Module, latents: Pair, expanded: Pair) -> HeadColumns:
    """Columns of the module's `kv_b_proj`; ModelError where its attention is not understood.

    latents: what the module cached, [1, 1, T, rank] and [1, 1, T, rotary]; expanded: the keys and
    values [1, H, T, width] that it gave to attention.
    """
    linear = getattr(module, "kv_b_proj", None)
    if linear is None or latents[0].shape[1] != 1 or latents[1].shape[1] != 1:
        raise ModelError(f"{path}: it changes keys or values after they are cached")
    heads, rotary = expanded[0].shape[1], latents[1].shape[-1]
    columns = HeadColumns(heads, expanded[0].shape[-1] - rotary, expanded[1].shape[-1])
    reason = _why_not_absorbed(module, linear, columns, latents, expanded)
    if reason is not None:
        raise ModelError(f"{path}: its latent attention cannot be served, {reason}")
    return columns


def _why_not_absorbed(
    module: nn.Module, linear: Any, columns: HeadColumns, latents: Pair, expanded: Pair
) -> str | None:
    if type(linear) is not nn.Linear or getattr(linear, "bias", None) is not None:
        return "its kv_b_proj is not a Linear without bias"
    if not callable(getattr(module, "expand_kv", None)):
        return "it has no method expand_kv"
    shape, rank = tuple(linear.weight.shape), latents[0].shape[-1]
    if columns.key < 1 or shape != (columns.heads * columns.width, rank):
        return f"its kv_b_proj {shape} does not give the columns of {columns}"
    if linear.weight.device.type == "meta":
        return None  # without values the shapes have to do
    both = functional.linear(latents[0][0, 0], linear.weight)
    of_heads = both.view(-1, columns.heads, columns.width).transpose(0, 1)[None]
    key, value = torch.split(of_heads, [columns.key, columns.value], 3)
    key = torch.cat((key, latents[1].expand(-1, columns.heads, -1, -1)), 3)
    parts = zip((key, value), expanded, strict=True)
    # an adapter or checkpoint with broken weights is no reason to refuse the architecture
    if not all(agree(torch.nan_to_num(want), torch.nan_to_num(got)) for want, got in parts):
        return "its keys and values are not what its kv_b_proj gives head by head"
    return None


def _as_cached(latents: torch.Tensor, rotary: torch.Tensor) -> Pair:
    """In place of a module's `expand_kv`."""
    return latents, rotary


def keep_latents(module: Any, columns: HeadColumns) -> LatentLinear:
    """Have `module` give attention what it caches, in place; what then stands for its keys.

    Comes after LoRA-aware modules took their places.
    """
    module.__dict__["expand_kv"] = _as_cached
    return LatentLinear(module.kv_b_proj, columns)
