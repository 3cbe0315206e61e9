"""Attention over a paged cache, written to be read."""

import torch

from vexpert.kernels.paged_types import AttentionBatch, Scores


def reference_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    batch: AttentionBatch,
    *,
    scaling: float,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same in float64, sequence by sequence; asks the device for all values."""
    how = Scores(scaling, window, chunk, softcap, sinks)
    if out is None:
        out = query.new_empty(*query.shape[:2], values.shape[2])
    starts, lens = batch.query_starts.tolist(), batch.kv_lens.tolist()
    for b, length in enumerate(lens):
        part = slice(starts[b], starts[b + 1])
        if part.start < part.stop:
            position = torch.arange(length, device=query.device)
            block = batch.block_tables[b, position // batch.block_size]
            rows = block * batch.block_size + position % batch.block_size
            out[part] = _attend_one(query[part], keys[rows], values[rows], how).to(out.dtype)
    return out


def reference_latent_attention(
    query: torch.Tensor,
    rotary: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    batch: AttentionBatch,
    *,
    scaling: float,
    window: int | None = None,
    chunk: int | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`latent_attention` in float64: both parts together, and the first as values."""
    both = torch.cat((query, rotary), 2), torch.cat((keys, values), 2)
    return reference_attention(
        *both, keys, batch, scaling=scaling, window=window, chunk=chunk, out=out
    )


def _attend_one(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, how: Scores
) -> torch.Tensor:
    """Query [q, Hq, d], the last of keys [n, Hkv, d]: [q, Hq, dv] float64."""
    repeat = query.shape[1] // keys.shape[1]
    key = keys.double().repeat_interleave(repeat, 1)
    value = values.double().repeat_interleave(repeat, 1)
    scores = torch.einsum("ihd,jhd->hij", query.double(), key) * how.scaling
    if how.softcap is not None:
        scores = how.softcap * torch.tanh(scores / how.softcap)
    j = torch.arange(keys.shape[0], device=query.device)
    i = j[-query.shape[0] :, None]
    seen = j <= i
    if how.window is not None:
        seen &= j > i - how.window
    if how.chunk is not None:
        seen &= j // how.chunk == i // how.chunk
    scores = scores.masked_fill(~seen, float("-inf"))
    if how.sinks is not None:
        sink = how.sinks.double()[:, None, None].expand(-1, query.shape[0], 1)
        scores = torch.cat((scores, sink), 2)
    weights = torch.softmax(scores, 2)[:, :, : keys.shape[0]]
    return torch.einsum("hij,jhd->ihd", weights, value)
