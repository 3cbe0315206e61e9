"""KV blocks: free list, reference counts, and full blocks kept for later requests.

A block is in exactly one state:

    free        on the free list, content meaningless
    used        in the block tables of `ref_count` running sequences
    evictable   ref_count 0, but published under a digest: reusable until its memory is needed

The digest of a full block covers the adapter version (or base) and every token from the start of
the sequence, so equal digests mean equal KV.
"""

import hashlib
from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence

from vexpert.lora.types import AdapterRef

DIGEST_BYTES = 16


def root_digest(adapter: AdapterRef | None) -> bytes:
    """Start of the chain: one for the base model, one for each version of each adapter."""
    key = "base" if adapter is None else f"adapter {adapter.version} {adapter.name}"
    return hashlib.blake2b(key.encode(), digest_size=DIGEST_BYTES).digest()


def chain_digest(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Digest of a full block that follows the block (or root) with digest `parent`."""
    content = parent + array("q", token_ids).tobytes()
    return hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest()


class BlockPool:
    """Hands out block ids `0 .. num_blocks-1`. Not thread-safe: the engine's thread only."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = deque(range(num_blocks))
        self._ref_counts = [0] * num_blocks
        self._digests: list[bytes | None] = [None] * num_blocks
        self._published: dict[bytes, int] = {}
        self._evictable: OrderedDict[int, None] = OrderedDict()  # oldest first

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can give now."""
        return len(self._free) + len(self._evictable)

    @property
    def num_used(self) -> int:
        """Blocks in some sequence's table."""
        return self.num_blocks - self.num_available

    def match(self, digests: Sequence[bytes]) -> list[int]:
        """Published blocks of the longest prefix of `digests`. Changes nothing."""
        blocks: list[int] = []
        for digest in digests:
            block = self._published.get(digest)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def num_idle(self, blocks: Iterable[int]) -> int:
        """How many of `blocks` no sequence uses: sharing them lowers `num_available`."""
        return sum(1 for block in blocks if self._ref_counts[block] == 0)

    def share(self, blocks: Iterable[int]) -> None:
        """Count one more user of each of `blocks`, which `match` has returned."""
        for block in blocks:
            self._ref_counts[block] += 1
            self._evictable.pop(block, None)

    def allocate(self) -> int:
        """A block with one user; evicts the least recently used published block if none is free."""
        assert self.num_available > 0, "allocate() without an available block"
        block = self._free.popleft() if self._free else self._evict()
        self._ref_counts[block] = 1
        return block

    def _evict(self) -> int:
        block, _ = self._evictable.popitem(last=False)
        digest = self._digests[block]
        assert digest is not None
        del self._published[digest]
        self._digests[block] = None
        return block

    def publish(self, block: int, digest: bytes) -> None:
        """Let later sequences find a full, written block; the first block of a digest stays."""
        if digest not in self._published:
            self._published[digest] = block
            self._digests[block] = digest

    def release(self, blocks: Sequence[int]) -> None:
        """Undo one use of each of `blocks`, given in order of position.

        The last block goes first into the eviction order: a prefix outlives what follows it.
        """
        for block in reversed(blocks):
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0:
                if self._digests[block] is None:
                    self._free.append(block)
                else:
                    self._evictable[block] = None

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Assert that counts, lists and digests agree with the block tables of all sequences."""
        uses = [0] * self.num_blocks
        for table in tables:
            assert len(set(table)) == len(table), f"a block twice in one table: {table}"
            for block in table:
                uses[block] += 1
        assert uses == self._ref_counts, "reference counts differ from the block tables"
        free, evictable = set(self._free), set(self._evictable)
        assert len(free) == len(self._free), "a block twice on the free list"
        assert not free & evictable, "a block both free and evictable"
        assert free | evictable == {b for b, n in enumerate(uses) if n == 0}, "a block is lost"
        for block, digest in enumerate(self._digests):
            if digest is not None:
                assert self._published[digest] == block, "a digest names another block"
                assert block not in free, "a published block on the free list"
        assert len(self._published) == sum(d is not None for d in self._digests)
        assert all(self._digests[block] is not None for block in evictable)
