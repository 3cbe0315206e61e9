"""Attention over the paged cache, as a function of transformers' AttentionInterface.

With the Triton backend it runs as kernels over the cache (`ops/attention.py`). On a CPU, and for
latent attention, whole contexts are gathered and go through PyTorch's own attention.

A layer keeps keys and values [num_blocks * block_size, Hkv, d], or the compressed latents of
multi-head latent attention in the same layout with one head. The step's metadata comes from the
layer object that sits on the attention module, so several models live in one process.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from vexpert.models.masks import MaskKind
from vexpert.models.plan import Group, StepPlan
from vexpert.ops import attention as ops

NAME = "vexpert"
SCORES_AT_ONCE = 1 << 26  # elements of float32 scores that the explicit softmax holds: 256 MiB


@dataclass
class StepContext:
    """What the layers of one model share: the plan of the running step."""

    plan: StepPlan | None = None

    @property
    def running(self) -> StepPlan:
        assert self.plan is not None, "attention outside a step"
        return self.plan


def _finite(values: torch.Tensor) -> torch.Tensor:
    """`values` with zeros for NaN and infinities."""
    return torch.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0)


@dataclass(frozen=True)
class Softmax:
    """How scores become weights: factor, optional cap of tanh, optional sink logit of each head."""

    scaling: float
    softcap: float | None = None
    sinks: torch.Tensor | None = None  # [Hq] in the model's dtype


class AttentionLayer:
    """Cache and mask kind of one attention module. `key_shape`, `value_shape`: (heads, width)."""

    def __init__(
        self,
        context: StepContext,
        kind: MaskKind,
        key_shape: tuple[int, int],
        value_shape: tuple[int, int],
        is_latent: bool,
        use_kernels: bool = False,
        batch_invariant: bool = False,
    ) -> None:
        self.context = context
        self.kind = kind
        self.key_shape = key_shape
        self.value_shape = value_shape
        self.is_latent = is_latent
        self.use_kernels = use_kernels and not is_latent
        self.batch_invariant = batch_invariant
        self.keys = torch.empty(0)
        self.values = torch.empty(0)

    @property
    def elements_per_token(self) -> int:
        """Cache elements that one token takes in this layer."""
        return sum(heads * width for heads, width in (self.key_shape, self.value_shape))

    def allocate(self, blocks: int, block_size: int, dtype: torch.dtype, device: Any) -> None:
        """Zeroed cache: padding is read under a mask, so it must be finite.

        Raises UnsupportedError where the kernels cannot run these heads.
        """
        if self.use_kernels:
            width = max(self.key_shape[1], self.value_shape[1])
            ops.check_attention(torch.device(device), dtype, width)
        rows = blocks * block_size
        self.keys = torch.zeros(rows, *self.key_shape, dtype=dtype, device=device)
        self.values = torch.zeros(rows, *self.value_shape, dtype=dtype, device=device)

    def write(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Put the step's key and value [1, Hkv, T, d] into the cache, in place."""
        rows = self.context.running.step.cache_rows
        if self.use_kernels:
            tokens = key[0].transpose(0, 1), value[0].transpose(0, 1)
            ops.write_cache(*tokens, rows, self.keys, self.values)
            return
        # What is not finite (an adapter with broken weights) must not stay in a block: its next
        # owner gives unwritten rows the weight zero, and zero times NaN is NaN.
        self.keys.index_copy_(0, rows, _finite(key[0].transpose(0, 1)))
        self.values.index_copy_(0, rows, _finite(value[0].transpose(0, 1)))

    def read(self, cache: torch.Tensor, blocks: torch.Tensor, sequences: int) -> torch.Tensor:
        """Whole blocks of `cache`: [sequences, length, Hkv, d]."""
        size = self.context.running.block_size
        found = cache.view(-1, size * cache.shape[1] * cache.shape[2]).index_select(0, blocks)
        return found.view(sequences, -1, cache.shape[1], cache.shape[2])

    def attend(self, query: torch.Tensor, softmax: Softmax) -> torch.Tensor:
        """Attention of query [T, Hq, d] over what the cache holds: [T, Hq, d of value]."""
        run = ops.invariant_attention if self.batch_invariant else ops.paged_attention
        return run(
            query,
            self.keys,
            self.values,
            self.context.running.attention_batch,
            scaling=softmax.scaling,
            window=self.kind.window,
            chunk=self.kind.chunk,
            softcap=softmax.softcap,
            sinks=softmax.sinks,
        )

    def latent_context(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Cached latents of all sequences of the step, [1, 1, context_size, width] each."""
        plan = self.context.running
        parts = [keys.blocks for keys in plan.keys(self.kind)]
        blocks = parts[0] if len(parts) == 1 else torch.cat(parts)
        latents = self.read(self.keys, blocks, 1).transpose(1, 2)
        return latents, self.read(self.values, blocks, 1).transpose(1, 2)


def paged_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: object,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Attention of all tokens of the step; writes their key and value to the cache in place.

    query [1, Hq, T, d], key and value [1, Hkv, T, d] (latent: the expanded context of all
    sequences). Returns [1, T, Hq, d of value].
    """
    layer = module.vexpert_layer
    assert isinstance(layer, AttentionLayer)
    softmax = Softmax(query.shape[-1] ** -0.5 if scaling is None else scaling, softcap, s_aux)
    if not layer.is_latent:
        layer.write(key, value)
        key = value = query  # never read: the context comes from the cache
    rows = query[0].transpose(0, 1)
    if layer.use_kernels:
        return layer.attend(rows, softmax)[None], None
    return _attend_groups(layer, rows, key, value, softmax)[None], None


def _attend_groups(
    layer: AttentionLayer,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    softmax: Softmax,
) -> torch.Tensor:
    """Attention of query [T, Hq, d], group by group; [T, Hq, d of value]."""
    plan = layer.context.running
    all_keys = plan.keys(layer.kind)
    heads = key.shape[1] if layer.is_latent else layer.key_shape[0]
    masks = plan.head_masks(layer.kind, query.shape[1] // heads)
    out: torch.Tensor | None = None
    start = 0
    for group, keys, mask in zip(plan.groups, all_keys, masks, strict=True):
        n = len(group.sequences)
        if layer.is_latent:
            part = slice(start, start + n * keys.length)
            k = _by_sequence(key, part, n)
            v = _by_sequence(value, part, n)
            start += n * keys.length
        else:
            k = layer.read(layer.keys, keys.blocks, n).transpose(1, 2)
            v = layer.read(layer.values, keys.blocks, n).transpose(1, 2)
        done = _attend(query[group.rows], k, v, mask, group, softmax)
        if len(plan.groups) == 1:
            return done
        if out is None:
            out = done.new_empty(plan.num_tokens, *done.shape[1:])
        out[group.rows] = done
    assert out is not None, "a step has at least one token"
    return out


def _by_sequence(context: torch.Tensor, part: slice, sequences: int) -> torch.Tensor:
    """Rows `part` of the expanded context [1, H, C, d] as [sequences, H, length, d]."""
    _, heads, _, width = context.shape
    return context[0, :, part].reshape(heads, sequences, -1, width).transpose(0, 1)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    group: Group,
    softmax: Softmax,
) -> torch.Tensor:
    """One group: query [n * q, Hq, d], key and value [n, Hkv, S, d], mask [n, 1, G * q, S].

    The G query heads of one KV head are rows of one product, so keys are never repeated.
    """
    n, heads = key.shape[:2]
    q = query.view(n, group.q, heads, -1, query.shape[-1]).permute(0, 2, 3, 1, 4).flatten(2, 3)
    if softmax.softcap is None and softmax.sinks is None:
        out = functional.scaled_dot_product_attention(
            q, key, value, attn_mask=mask, scale=softmax.scaling
        )
    else:
        out = _explicit(q, key, value, mask, softmax)
    split = out.reshape(n, heads, -1, group.q, out.shape[-1])  # [n, Hkv, G, q, d]
    return split.permute(0, 3, 1, 2, 4).reshape(n * group.q, query.shape[1], -1).contiguous()


def _explicit(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, how: Softmax
) -> torch.Tensor:
    """Softmax written out, for score caps and sinks; query rows in parts that bound the memory."""
    n, heads, rows, _ = query.shape
    sinks = None
    if how.sinks is not None:
        repeat = how.sinks.shape[0] // heads
        per_row = how.sinks.float().view(heads, repeat).repeat_interleave(rows // repeat, 1)
        sinks = per_row[None, :, :, None].expand(n, -1, -1, 1)
    step = max(1, SCORES_AT_ONCE // (n * heads * key.shape[2]))
    out = query.new_empty(*query.shape[:-1], value.shape[-1])
    for begin in range(0, rows, step):
        part = slice(begin, begin + step)
        scores = torch.matmul(query[:, :, part], key.transpose(2, 3)).float() * how.scaling
        if how.softcap is not None:
            scores = torch.tanh(scores / how.softcap) * how.softcap
        scores = scores.masked_fill(~mask[:, :, part], float("-inf"))
        if sinks is not None:
            scores = torch.cat((scores, sinks[:, :, part]), dim=-1)
        weights = torch.softmax(scores, dim=-1)[..., : key.shape[2]]
        out[:, :, part] = torch.matmul(weights.to(value.dtype), value)
    return out
