"""The backend for float32 on CPUs that have numba: torch's, with a compiled LoRA kernel."""

import threading

import numba
import numpy as np
import torch

from vexpert.kernels import cpu_lora
from vexpert.ops.backend import check_operands
from vexpert.ops.routing import Routing
from vexpert.ops.torch_backend import TorchBackend
from vexpert.ops.torch_lora import SEGMENT_ROWS, Delta
from vexpert.ops.torch_routing import Pairs, TorchRouting
from vexpert.ops.types import LoraSite, OutputSlice, SiteTable

# Multiplications from which the rows are shared out over threads. Cold factors come at 10 GB/s a
# thread, so a second one pays from about 30 us of work (32 pairs of rank 8, hidden 256; 2 cores:
# 8 adapters at batch 8 reach 84% of base with it, 83% without).
PARALLEL_WORK = 1 << 18
_NO_ROWS = np.empty(0, dtype=np.int64)
# One of numba's threading layers must not be entered by two threads at once.
_lock = threading.Lock()


class NumbaBackend(TorchBackend):
    """Implements `LoraBackend` in float32. Few rows of a virtual expert are one compiled loop; many
    rows of one virtual expert are matrix products, as in the torch backend."""

    name = "numba"

    def __init__(self) -> None:
        super().__init__()
        self._parts: dict[tuple[OutputSlice, ...], np.ndarray] = {}
        self._scratch = np.empty((1, 1), dtype=np.float32)
        numba.set_num_threads(min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS))
        _compile()

    def apply(
        self,
        x: torch.Tensor,
        y: torch.Tensor,
        site: LoraSite,
        table: SiteTable,
        routing: Routing,
        x_rows: torch.Tensor | None = None,
    ) -> None:
        assert isinstance(routing, TorchRouting)
        check_operands(self.name, x, y, site, table, routing.num_rows)
        pairs = routing.pairs
        if _has_segments(routing):
            segments, pairs = routing.split(SEGMENT_ROWS)
            delta = Delta(x, site, self._host(site, table), x_rows)
            for segment in segments:
                delta.add_segment(y, segment, segment.rows)
        if len(pairs.rows):
            self._add(x.contiguous(), y, site, table, pairs, x_rows)

    def _add(
        self,
        x: torch.Tensor,
        y: torch.Tensor,
        site: LoraSite,
        table: SiteTable,
        pairs: Pairs,
        x_rows: torch.Tensor | None,
    ) -> None:
        if not y.is_contiguous():
            added = torch.zeros_like(y, memory_format=torch.contiguous_format)
            self._add(x, added, site, table, pairs, x_rows)
            rows = torch.from_numpy(pairs.rows)
            y[rows] += added[rows]
            return
        host, count = self._host(site, table), len(pairs.rows)
        work = count * site.max_rank * (site.in_features + site.out_features)
        call = cpu_lora.add_serial if work < PARALLEL_WORK else cpu_lora.add_parallel
        with _lock:
            call(
                x.numpy(),
                _NO_ROWS if x_rows is None else x_rows.numpy(),
                y.numpy(),
                *(pairs.rows, pairs.slots, pairs.experts),
                host.arena,
                *(host.rank, host.a_offset, host.a_stride),
                *(host.slice_rank, host.slice_column, host.b_offset, host.b_stride),
                self._part_table(site.slices),
                self._buffer(count, site.max_rank),
            )

    def _part_table(self, slices: tuple[OutputSlice, ...]) -> np.ndarray:
        if slices not in self._parts:
            rows = [(part.start, part.size, part.stride) for part in slices]
            self._parts[slices] = np.array(rows, dtype=np.int64).reshape(-1, 3)
        return self._parts[slices]

    def _buffer(self, rows: int, columns: int) -> np.ndarray:
        """Scratch of at least [rows, columns]; grows, and is reused by every call."""
        have = self._scratch.shape
        if have[0] < rows or have[1] < columns:
            shape = (max(rows, have[0]), max(columns, have[1]))
            self._scratch = np.empty(shape, dtype=np.float32)
        return self._scratch


def _has_segments(routing: TorchRouting) -> bool:
    """Whether virtual experts have rows enough, on average, for the split (0.1 ms) to pay."""
    rows = len(routing.pairs.rows)
    if rows < SEGMENT_ROWS:
        return False
    return rows >= SEGMENT_ROWS * len(routing.active_slots) * routing.num_experts


def _compile() -> None:
    """Compile both kernels, or read them from numba's cache on disk, before the first step."""
    one, ints = np.ones((1, 1), dtype=np.float32), np.zeros(1, dtype=np.int64)
    wide = np.zeros((1, 1), dtype=np.int64)
    parts = np.array([[0, 1, 1]], dtype=np.int64)
    for call in (cpu_lora.add_serial, cpu_lora.add_parallel):
        tables = (ints, ints, ints, wide, wide, wide, wide)
        call(one, _NO_ROWS, one.copy(), ints, ints, ints, one[0], *tables, parts, one.copy())
