"""Attention over a paged cache: what a step's sequences are, as index arrays on the device."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class AttentionBatch:
    """B sequences of one step; sequence b has the query rows query_starts[b] .. [b + 1] - 1.

    Its queries are the last positions of its kv_lens[b] keys, which lie in the cache rows
    block_tables[b, position // block_size] * block_size + position % block_size. A sequence without
    query rows is padding of a captured graph: nothing of it is read or written.
    """

    query_starts: torch.Tensor  # [B + 1] int64
    kv_lens: torch.Tensor  # [B] int64, this step's tokens included
    block_tables: torch.Tensor  # [B, W] int64; places past a sequence's end hold any valid id
    block_size: int
    max_query_len: int  # on the host; 1: decode alone
    max_kv_len: int  # on the host: no smaller than any of kv_lens; a captured graph's own limit
