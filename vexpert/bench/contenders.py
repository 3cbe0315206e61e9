"""What takes part in a row, as data: how to call it, and what its output must equal."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from vexpert.bench.draw import Draw
from vexpert.bench.layer import BenchLayer
from vexpert.bench.timer import Call
from vexpert.ops.types import ExpertsLora


@dataclass(frozen=True)
class Contender:
    """`make(layer, draw)` returns the callable to time.

    Its output is the layer's [T, H], checked `with_lora` or without; None: it is not checked.
    """

    name: str
    make: Callable[[BenchLayer, Draw], Call]
    with_lora: bool | None


def _base(layer: BenchLayer, draw: Draw) -> Call:
    return partial(layer.forward, draw, with_lora=False)


def _lora(layer: BenchLayer, draw: Draw) -> Call:
    return partial(layer.forward, draw, with_lora=True)


def _classic(layer: BenchLayer, draw: Draw) -> Call:
    return partial(layer.forward, draw, with_lora=True, classic=True)


def _routing(layer: BenchLayer, draw: Draw) -> Call:
    """The order of the pairs, or the grouping by virtual expert of rows that the base arranged."""
    fused = layer.fused
    if fused is not None:
        lora = ExpertsLora(draw.slots, draw.active_slots, *layer.sites)
        return partial(fused.order, draw.topk_ids, lora)
    backend, experts = layer.backend, layer.shape.experts
    pairs = backend.arrange(draw.topk_ids, experts)
    slots = draw.slots[pairs.token]
    return partial(backend.route, slots, pairs.expert, experts, layer.pool.num_slots)


BASE = Contender("base", _base, with_lora=False)
LORA = Contender("lora", _lora, with_lora=True)
ROUTING = Contender("routing", _routing, with_lora=None)
CLASSIC = Contender("classic", _classic, with_lora=True)
DEFAULT = (BASE, LORA, ROUTING)
