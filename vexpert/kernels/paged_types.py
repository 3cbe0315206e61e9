"""What the kernels of paged attention are told: a step's sequences, and how scores are made."""

import math
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class AttentionBatch:
    """B sequences of one step; sequence b has the query rows query_starts[b] .. [b + 1] - 1.

    Its queries are the last positions of its kv_lens[b] keys, which lie in the cache rows
    block_tables[b, position // block_size] * block_size + position % block_size. A sequence without
    query rows is padding of a captured graph: none of its keys is read.
    """

    query_starts: torch.Tensor  # [B + 1] int64
    kv_lens: torch.Tensor  # [B] int64, this step's tokens included
    block_tables: torch.Tensor  # [B, W] int64; places past a sequence's end hold any valid id
    block_size: int
    max_query_len: int  # on the host; 1: decode alone
    max_kv_len: int  # on the host: no smaller than any of kv_lens; a captured graph's own limit
    # [B * groups] int32 by groups
    _arrivals: dict[int, torch.Tensor] = field(default_factory=dict, repr=False, compare=False)

    @property
    def num_sequences(self) -> int:
        """B, padding included."""
        return self.kv_lens.shape[0]

    def arrivals(self, groups: int) -> torch.Tensor:
        """[B * groups] int32: zeros, and each kernel leaves zeros; one tensor for all layers.

        Made at the first call. If that is captured, the zeroing is part of that graph: another
        graph then needs a batch of its own, or a call before the captures.
        """
        found = self._arrivals.get(groups)
        if found is None:
            size = self.num_sequences * groups
            found = torch.zeros(size, dtype=torch.int32, device=self.kv_lens.device)
            self._arrivals[groups] = found
        return found


@dataclass(frozen=True)
class Scores:
    """Score of query i and key j <= i: cap(scaling * q . k), cap(x) = softcap * tanh(x / softcap).

    Keys with j <= i - window, or of another chunk than i's, do not count. A sink is a score of its
    own in the sum of the softmax, one a head, and has no value.
    """

    scaling: float  # > 0
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None  # [Hq] of any float dtype

    def __post_init__(self) -> None:
        assert self.scaling > 0, self.scaling
        assert self.softcap is None or self.softcap > 0, self.softcap
        assert self.window is None or self.window > 0, self.window
        assert self.chunk is None or self.chunk > 0, self.chunk

    def most_keys(self, max_kv_len: int) -> int:
        """How many keys one query sees at most."""
        return min(max_kv_len, self.window or max_kv_len, self.chunk or max_kv_len)

    def constants(self) -> dict[str, float | int | bool]:
        """The kernels' arguments; exponents there have base 2."""
        return {
            "scale": self.scaling * (1 if self.softcap else math.log2(math.e)),
            "softcap": float(self.softcap or 1.0),
            "window": self.window or 0,
            "chunk": self.chunk or 1,
            "HAS_WINDOW": self.window is not None,
            "HAS_CHUNK": self.chunk is not None,
            "HAS_SOFTCAP": self.softcap is not None,
            "HAS_SINKS": self.sinks is not None,
        }


@dataclass(frozen=True)
class PagedShape:
    """Sizes of one call, checked."""

    kv_heads: int
    group: int  # query heads of one KV head
    width: int  # d of query and key
    value_width: int
    rotary: int = 0  # columns of the second part of query and key; 0: there is none

    @classmethod
    def of(
        cls,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        rotary: torch.Tensor | None = None,
    ) -> "PagedShape":
        """Of query [T, Hq, d], keys [rows, Hkv, d], values [rows, Hkv, dv]; columns adjacent.

        rotary [T, Hq, dv]: `values` are then the second part of the keys, whose first is the value.
        """
        given = {"query": query, "keys": keys, "values": values, "rotary": rotary}
        for name, tensor in given.items():
            assert tensor is None or tensor.dim() == 3, (name, tuple(tensor.shape))
            assert tensor is None or tensor.stride(2) == 1, (name, tensor.stride())
        assert keys.shape[:2] == values.shape[:2], (tuple(keys.shape), tuple(values.shape))
        assert query.shape[2] == keys.shape[2], (tuple(query.shape), tuple(keys.shape))
        group, rest = divmod(query.shape[1], keys.shape[1])
        assert rest == 0, (tuple(query.shape), tuple(keys.shape))
        if rotary is None:
            return cls(keys.shape[1], group, keys.shape[2], values.shape[2])
        second = (*query.shape[:2], values.shape[2])
        assert rotary.shape == second, (tuple(rotary.shape), second)
        return cls(keys.shape[1], group, keys.shape[2], keys.shape[2], values.shape[2])
