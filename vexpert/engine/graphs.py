"""Decode steps as captured graphs: one launch where an eager step has hundreds.

A graph belongs to a size and a LoRA signature. A step is padded to the next size; padding writes
nothing and attends to nothing. A graph serves any adapters in any slots that have its signature,
since slots and site tables are tensors on the device.
"""

import dataclasses
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from vexpert.config import first_line
from vexpert.engine.adapters import AdapterSource
from vexpert.engine.capture import Capturer
from vexpert.engine.graph_buffers import Decoded, GraphBuffers
from vexpert.engine.scheduler import Chunk
from vexpert.log import get_logger
from vexpert.lora.types import BatchView, LoraSignature
from vexpert.models.types import ServedModel

logger = get_logger(__name__)

# Rows of a graph: each number where a row more is a large part of the step, then ever coarser.
FINE = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16)
STRIDES = ((128, 8), (256, 16), (512, 32), (1 << 31, 64))  # up to so many rows, in such strides
MOST_LORA_GRAPHS = 96  # besides those of the base model
CAPTURE_SHARE = 0.25  # of the time, at most, while requests run


def graph_sizes(most: int) -> tuple[int, ...]:
    """Rows of the graphs for steps of 1 .. `most` rows, ascending."""
    sizes = [size for size in FINE if size < most]
    size = FINE[-1]
    while size < most:
        size += next(stride for end, stride in STRIDES if size < end)
        sizes.append(min(size, most))
    return tuple(sizes) if sizes and sizes[-1] == most else (*sizes, most)


@dataclass(frozen=True)
class GraphKey:
    """What a graph was captured for."""

    size: int
    lora: LoraSignature | None

    def covers(self, other: "GraphKey") -> bool:
        """Whether a step of `other` may replay this graph: all its bounds hold."""
        if self.size < other.size or (self.lora is None) != (other.lora is None):
            return False
        if self.lora is None or other.lora is None:
            return True
        ranks = zip(self.lora.ranks, other.lora.ranks, strict=True)
        return self.lora.adapters >= other.lora.adapters and all(a >= b for a, b in ranks)


class DecodeGraphs:
    """Runs decode steps of `model` by replay. Base graphs are kept, LoRA's are bounded."""

    def __init__(
        self,
        model: ServedModel,
        adapters: AdapterSource,
        buffers: GraphBuffers,
        sizes: tuple[int, ...],
        capturer: Capturer,
        capture_share: float = CAPTURE_SHARE,
    ) -> None:
        self._model = model
        self._adapters = adapters
        self._buffers = buffers
        self.sizes = sizes
        self._capturer = capturer
        self._share = capture_share
        self._may_capture = 0.0  # from this time on
        self._base: dict[GraphKey, Callable[[], None]] = {}
        self._lora: OrderedDict[GraphKey, Callable[[], None]] = OrderedDict()  # last used last
        self.num_captured = 0
        self.last: Callable[[], None] | None = None  # what the last step replayed
        self.is_off = False  # after a failure

    def forget_rows(self) -> None:
        """Another step has run: tokens have moved on without these buffers."""
        self._buffers.rows.forget()

    def run(self, chunks: list[Chunk], chosen: torch.Tensor | None = None) -> Decoded | None:
        """Run a step of one token a chunk; writes its KV.

        `chosen`: see `Runner.run`. None: this step has to run eagerly, nothing is done.
        """
        if self.is_off or len(chunks) > self.sizes[-1]:
            return None
        self._buffers.upload(chunks, chosen)
        size = next(size for size in self.sizes if size >= len(chunks))
        view = self._view(size)
        if view is not None and not self._can_capture(view):
            return None
        replay = self._find(GraphKey(size, None if view is None else view.signature), view)
        if replay is None:
            return None
        self.last = replay
        replay()
        return self._buffers.decoded(len(chunks))

    def _view(self, size: int) -> BatchView | None:
        active = self._buffers.rows.active_slots
        if not active:
            return None
        slots = self._buffers.slots(size)
        return self._adapters.batch_view(slots, slots, active)

    def _can_capture(self, view: BatchView) -> bool:
        """Extras and the classic path need to know on the host which adapters run."""
        has_extras = any(slot in self._model.lora.installed for slot in view.active_slots)
        return view.use_virtual_experts and view.signature is not None and not has_extras

    def _find(self, key: GraphKey, view: BatchView | None) -> Callable[[], None] | None:
        graphs = self._base if key.lora is None else self._lora
        found = graphs.get(key)
        if found is None:
            if time.monotonic() < self._may_capture:
                key = next((other for other in graphs if other.covers(key)), key)
                found = graphs.get(key)
            else:
                found = self._capture(key, view)
        if found is not None and key.lora is not None:
            self._lora.move_to_end(key)
        return found

    def _capture(self, key: GraphKey, view: BatchView | None) -> Callable[[], None] | None:
        began = time.monotonic()
        try:
            with self._buffers.rehearsal():
                replay = self._capturer.capture(self._work(key.size, view))
        except RuntimeError as error:
            self.is_off = True
            logger.warning("CUDA graphs are off, steps run eagerly: %s", first_line(error))
            return None
        now = time.monotonic()
        self._may_capture = now + (now - began) * (1 / self._share - 1)
        self.num_captured += 1
        self._keep(key, replay)
        return replay

    def _work(self, size: int, view: BatchView | None) -> Callable[[], None]:
        """What a graph of `size` rows does."""
        step = self._buffers.step(size, view)

        def run() -> None:
            tokens = self._buffers.begin(size)
            self._buffers.end(self._model.raw_logits(dataclasses.replace(step, token_ids=tokens)))

        return run

    def _keep(self, key: GraphKey, replay: Callable[[], None]) -> None:
        if key.lora is None:
            self._base[key] = replay
            return
        self._lora[key] = replay
        if len(self._lora) > MOST_LORA_GRAPHS:
            self._lora.popitem(last=False)

    def rehearsal(self) -> AbstractContextManager[None]:
        """Inside, `last` may be called any number of times: no later step is changed."""
        return self._buffers.rehearsal()

    def rehearse(self) -> None:
        """Run the base model's graphs on padding alone, without a capture: kernels compile."""
        self._buffers.clear()
        for size in self.sizes:
            self._work(size, None)()

    def warm_up(self) -> None:
        """Capture the base model's graphs, the largest first: the others then fit its memory."""
        self._buffers.clear()
        for size in reversed(self.sizes):
            if not self.is_off:
                self._capture(GraphKey(size, None), None)
        self._may_capture = 0.0
