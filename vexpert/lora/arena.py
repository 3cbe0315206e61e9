"""The device buffer that holds every adapter's factors, and the allocator that divides it."""

from dataclasses import dataclass

import torch

from vexpert.lora.pack import align_up

# A move copies through a scratch of this size, never a whole adapter. On a GPU each piece is two
# calls of the engine's thread; a CPU's pieces stay in its cache.
CPU_MOVE_ELEMENTS, GPU_MOVE_ELEMENTS = 1 << 22, 1 << 25


@dataclass(frozen=True)
class Move:
    """A block that slides towards the start of the arena: `target < source`; in elements."""

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
        self.used = 0

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
                self.used += size
                return start
        return None

    def free(self, start: int) -> None:
        """Give back the block at `start`."""
        assert start in self.blocks, f"no block starts at {start}"
        size = self.blocks.pop(start)
        self.used -= size
        merged: list[tuple[int, int]] = []
        for hole in sorted([*self.holes, (start, size)]):
            if merged and merged[-1][0] + merged[-1][1] == hole[0]:
                merged[-1] = (merged[-1][0], merged[-1][1] + hole[1])
            else:
                merged.append(hole)
        self.holes = merged

    def next_move(self, size: int) -> Move | None:
        """The first of the moves that make one hole of `size` at the least cost; None: no room.

        It slides a block to the left, over the hole before it. Repeated, with `relocate` after
        each, until `allocate` succeeds: every move shortens what is left to move.
        """
        size = self.rounded(size)
        best: tuple[int, int] | None = None  # (elements to move, index of the first hole)
        first = room = 0
        for last, (start, hole) in enumerate(self.holes):
            room += hole
            while room - self.holes[first][1] >= size:
                room -= self.holes[first][1]
                first += 1
            if room >= size:
                cost = start + hole - self.holes[first][0] - room
                best = min(best, (cost, first)) if best else (cost, first)
                assert last > first, "one hole is enough: allocate instead"
        if best is None:
            return None
        target, hole = self.holes[best[1]]
        return Move(target + hole, target, self.blocks[target + hole])

    def relocate(self, move: Move) -> None:
        """Book `move`, which slides a block to the left over the hole before it."""
        size = self.blocks.pop(move.source)
        index = next(i for i, (start, _) in enumerate(self.holes) if start == move.target)
        hole = (move.target + size, move.source - move.target)
        self.blocks[move.target] = size
        after = self.holes[index + 1] if index + 1 < len(self.holes) else None
        if after is not None and hole[0] + hole[1] == after[0]:
            self.holes[index : index + 2] = [(hole[0], hole[1] + after[1])]
        else:
            self.holes[index] = hole

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
        assert self.used == sum(self.blocks.values())


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

    def span(self, start: int, size: int) -> torch.Tensor:
        """Elements `start` ... `start + size` as a view."""
        return self.buffer[start : start + size]

    def move(self, move: Move) -> None:
        """Slide the contents of a block to the left, and book it. Not during a step.

        Raises RuntimeError, and has moved nothing, where there is no memory for it.
        """
        piece = min(move.size, GPU_MOVE_ELEMENTS if self.buffer.is_cuda else CPU_MOVE_ELEMENTS)
        # Through a copy where source and target of one chunk overlap; its memory is taken first:
        # where there is none, the block is whole, where it was.
        overlaps = move.source - move.target < piece
        scratch = torch.empty_like(self.span(0, piece)) if overlaps else None
        for done in range(0, move.size, piece):
            count = min(piece, move.size - done)
            chunk = self.span(move.source + done, count)
            chunk = chunk if scratch is None else scratch[:count].copy_(chunk)
            self.span(move.target + done, count).copy_(chunk)
        self.allocator.relocate(move)
