"""The backend for float32 on CPUs that have numba: torch's, with a compiled LoRA kernel."""

import threading

import numba
import numpy as np
import torch

from vexpert.kernels import cpu_lora
from vexpert.ops.torch_backend import TorchBackend
from vexpert.ops.torch_lora import SEGMENT_ROWS, Delta
from vexpert.ops.torch_routing import IntArray, TorchRouting, as_rows
from vexpert.ops.types import LoraSite, SiteTable

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
        threads = torch.get_num_threads()
        numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))
        _compile()
        # As numba's threads start they set OpenMP's number of threads, which is torch's too.
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)

    def _apply(
        self,
        x: torch.Tensor,
        y: torch.Tensor,
        site: LoraSite,
        table: SiteTable,
        routing: TorchRouting,
        x_rows: torch.Tensor | None,
    ) -> None:
        slots, rest = routing.slots, None
        if _has_segments(routing):
            segments, rest = routing.split(SEGMENT_ROWS)
            delta = Delta(x, site, self._host(site, table), x_rows)
            for segment in segments:
                delta.add_segment(y, segment, segment.rows)
            slots = np.full_like(slots, -1)
            slots[rest.rows] = rest.slots
        if y.is_contiguous():
            self._add_rows(x, y, site, table, routing, slots, x_rows)
            return
        added = torch.zeros_like(y, memory_format=torch.contiguous_format)
        self._add_rows(x, added, site, table, routing, slots, x_rows)
        rows = as_rows((rest or routing.pairs).rows)
        y[rows] += added[rows]

    def _add_rows(
        self,
        x: torch.Tensor,
        y: torch.Tensor,
        site: LoraSite,
        table: SiteTable,
        routing: TorchRouting,
        slots: IntArray,
        x_rows: torch.Tensor | None,
    ) -> None:
        """The compiled loop over all rows whose slot in `slots` [P] is not negative."""
        work = len(slots) * site.max_rank * (site.in_features + site.out_features)
        call = cpu_lora.add_serial if work < PARALLEL_WORK else cpu_lora.add_parallel
        host = self._host(site, table)
        with _lock:
            call(
                x.contiguous().numpy(),
                _NO_ROWS if x_rows is None else x_rows.numpy(),
                y.numpy(),
                slots,
                _NO_ROWS if routing.experts is None else routing.experts,
                site.num_experts,
                host.arena,
                host.packed,
                host.parts,
            )


def _has_segments(routing: TorchRouting) -> bool:
    """Whether virtual experts have rows enough, on average, for the split (0.1 ms) to pay."""
    enough = SEGMENT_ROWS * routing.num_experts
    if routing.num_rows < enough:
        return False
    return len(routing.pairs.rows) >= enough * max(1, len(routing.active_slots))


def _compile() -> None:
    """Compile both kernels, or read them from numba's cache on disk, before the first step."""
    one, ints = np.ones((1, 1), dtype=np.float32), np.zeros(1, dtype=np.int64)
    packed = np.zeros((7, 1), dtype=np.int64)
    parts = np.array([[0, 1, 1]], dtype=np.int64)
    for call in (cpu_lora.add_serial, cpu_lora.add_parallel):
        call(one, _NO_ROWS, one.copy(), ints, ints, 1, one[0], packed, parts)
