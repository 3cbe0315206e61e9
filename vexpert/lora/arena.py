"""The device buffer that holds every adapter's factors, and the allocator that divides it."""

from dataclasses import dataclass

import torch

from vexpert.lora.pack import align_up

MOVE_ELEMENTS = 1 << 22  # compaction copies through a scratch of this size, never a whole adapter


@dataclass(frozen=True)
class Move:
    """A block that compaction shifts towards the start: `target < source`; in elements."""

    source: int
    target: int
    size: int


class Allocator:
    """First fit over a free list sorted by start; neighbours coalesce. Units are elements."""

    def __init__(self, capacity: int, alignment: int) -> None:
        self.capacity = capacity // alignment * alignment
        self.alignment = alignment
        self.blocks: dict[int, int] = {}  # start -> size, of what is in use
        self.holes: list[tuple[int, int]] = [(0, self.capacity)] if self.capacity else []

    @property
    def used(self) -> int:
        return sum(self.blocks.values())

    @property
    def free_total(self) -> int:
        return self.capacity - self.used

    def rounded(self, size: int) -> int:
        """Elements that a block of `size` takes."""
        return max(align_up(size, self.alignment), self.alignment)

    def allocate(self, size: int) -> int | None:
        """Start of a new block, or None when no single hole is large enough."""
        size = self.rounded(size)
        for index, (start, room) in enumerate(self.holes):
            if room >= size:
                rest = [(start + size, room - size)] if room > size else []
                self.holes[index : index + 1] = rest
                self.blocks[start] = size
                return start
        return None

    def free(self, start: int) -> None:
        """Give back the block at `start`."""
        assert start in self.blocks, f"no block starts at {start}"
        merged: list[tuple[int, int]] = []
        for hole in sorted([*self.holes, (start, self.blocks.pop(start))]):
            if merged and merged[-1][0] + merged[-1][1] == hole[0]:
                merged[-1] = (merged[-1][0], merged[-1][1] + hole[1])
            else:
                merged.append(hole)
        self.holes = merged

    def compact(self) -> list[Move]:
        """Shift all blocks to the start, in order; the moves to make, to be done in this order."""
        moves: list[Move] = []
        blocks: dict[int, int] = {}
        position = 0
        for start in sorted(self.blocks):
            size = self.blocks[start]
            if start != position:
                moves.append(Move(start, position, size))
            blocks[position] = size
            position += size
        self.blocks = blocks
        self.holes = [(position, self.capacity - position)] if position < self.capacity else []
        return moves

    def check_integrity(self) -> None:
        """Assert that blocks and holes tile the capacity exactly and that no two holes touch."""
        spans = [(start, size, True) for start, size in self.blocks.items()]
        spans += [(start, size, False) for start, size in self.holes]
        position, after_hole = 0, False
        for start, size, in_use in sorted(spans):
            assert start == position, f"overlap or gap at element {min(start, position)}"
            assert size == self.rounded(size), f"bad size {size} at {start}"
            assert in_use or not after_hole, f"two holes meet at {start}"
            position, after_hole = start + size, not in_use
        assert position == self.capacity, f"{position} of {self.capacity} elements accounted for"


class Arena:
    """A flat buffer on the device; blocks start at multiples of `alignment` elements."""

    def __init__(
        self, nbytes: int, device: torch.device, dtype: torch.dtype, alignment: int
    ) -> None:
        self.allocator = Allocator(nbytes // dtype.itemsize, alignment)
        self.buffer = torch.empty(self.allocator.capacity, dtype=dtype, device=device)

    @property
    def itemsize(self) -> int:
        return self.buffer.element_size()

    @property
    def nbytes(self) -> int:
        """Bytes that can be allocated."""
        return self.allocator.capacity * self.itemsize

    @property
    def used_bytes(self) -> int:
        return self.allocator.used * self.itemsize

    def write(self, start: int, source: torch.Tensor) -> None:
        """Copy the host buffer `source` [n] to `start`; asynchronous when `source` is pinned."""
        self.buffer[start : start + source.numel()].copy_(source, non_blocking=True)

    def compact(self) -> list[Move]:
        """Close all holes; contents move in place. Returns what moved."""
        moves = self.allocator.compact()
        for move in moves:
            for done in range(0, move.size, MOVE_ELEMENTS):
                count = min(MOVE_ELEMENTS, move.size - done)
                # Through a copy: source and target of one chunk may overlap.
                chunk = self.buffer[move.source + done :][:count].clone()
                self.buffer[move.target + done :][:count].copy_(chunk)
        return moves
