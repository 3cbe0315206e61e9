"""Decoder layers of prompts as programs: what stands in the key, and that the inputs are all."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from helpers_models import tiny_model
from test_models_fused import DeviceDriver, fused
from test_models_lora import random_adapter
from triton.runtime.interpreter import GridExecutor

from vexpert.kernels.replay import Replays
from vexpert.kernels.replay_program import Tensors
from vexpert.kernels.replay_record import _Operations
from vexpert.lora.pack import pack
from vexpert.lora.pool import SlotPool
from vexpert.lora.types import AdapterWeights, BatchView
from vexpert.models import fused_layer, replayed_layer
from vexpert.models.types import StepInput

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter's")


@dataclass
class Call:
    """One layer of one step."""

    key: Hashable
    inputs: Sequence[torch.Tensor]


class Calls(list[Call]):
    """`way`: how a step's first layer is run; all others are not."""

    way: Callable[[Callable[[], Tensors]], Tensors] | None = None


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Of all layers from here on, as if this were a GPU."""
    found = Calls()

    def call(
        self: Replays,
        owner: object,
        key: Hashable,
        inputs: Sequence[torch.Tensor],
        run: Callable[[], Tensors],
        unsaid: int | None = None,
    ) -> Tensors:
        if self.name != "decoder layer":
            return run()
        found.append(Call(key, inputs))
        if found.way is not None and len(found) == 1:
            return found.way(run)
        return inputs[0].clone(), inputs[1].clone()

    monkeypatch.setattr(Replays, "__call__", call)
    monkeypatch.setattr(replayed_layer, "LEAST_TOKENS", 1)
    monkeypatch.setattr(fused_layer, "MOST_TOKENS", 0)  # as of more tokens
    monkeypatch.setattr(replayed_layer, "_is_on_gpu", lambda _: True)
    return found


class Model:
    """A tiny model with two adapters in a pool, of other ranks."""

    def __init__(self, model_type: str) -> None:
        self.served = fused(tiny_model(model_type), enable_lora=True, max_lora_rank=32, max_loras=2)
        targets = self.served.targets
        self.pool = SlotPool(targets, 2, 1 << 22, torch.device("cpu"), torch.float32)
        self.served.lora.tables = self.pool.tables
        for seed, rank in ((1, 3), (2, 20)):
            adapter = random_adapter(targets, seed, rank)
            kept = {
                path: factors
                for path, factors in adapter.modules.items()
                if "self_attn" in path or "experts" in path
            }
            self.pool.install(pack(AdapterWeights(kept), targets, torch.float32))
        self.driver = DeviceDriver(self.served)

    def step(self, lengths: list[int], slots: list[int] | None = None) -> StepInput:
        ids = [list(range(3, 3 + length)) for length in lengths]
        blocks: list[list[int]] = [[] for _ in lengths]
        chosen = list(enumerate(lengths))
        step = self.driver._step(chosen, [0] * len(lengths), ids, blocks, None)
        for own in blocks:
            self.driver.free += own
        if slots is None:
            return step
        of_row = torch.tensor(slots).repeat_interleave(torch.tensor(lengths))
        active = tuple(sorted({slot for slot in slots if slot >= 0}))
        view = BatchView(of_row, of_row, active, True, self.pool.signature(active))
        return replace(step, lora=view)

    @torch.inference_mode()
    def run(self, calls: Calls, step: StepInput) -> list[Call]:
        """The layers of one step."""
        calls.clear()
        self.served.forward(step)
        assert len(calls) == 2
        return calls.copy()


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])
def test_keys_and_inputs(model_type: str, calls: Calls) -> None:
    model = Model(model_type)
    first, second = model.run(calls, model.step([3]))
    alike = model_type == "qwen3_moe"  # gpt_oss has a window in every other layer
    assert (first.key == second.key) == alike
    assert [one.shape for one in first.inputs] == [one.shape for one in second.inputs]
    weights = [
        one.data_ptr() == other.data_ptr()
        for one, other in zip(first.inputs, second.inputs, strict=True)
    ]
    assert weights.count(False) > weights.count(True)
    assert [call.key for call in model.run(calls, model.step([3]))] == [first.key, second.key]
    different = [first.key]
    steps = [
        model.step([2]),  # another length
        model.step([2, 1]),  # another number of sequences
        model.step([3], [0]),  # an adapter
        model.step([3], [1]),  # of another rank
        model.step([2, 1], [0, 1]),  # two
    ]
    for step in steps:
        one, other = model.run(calls, step)
        assert (one.key == other.key) == alike
        assert one.key not in different
        different.append(one.key)
    assert model.run(calls, model.step([2, 1], [1, -1]))[0].key not in different
    assert model.run(calls, model.step([2, 1], [1, 0]))[0].key == different[-1]


@pytest.mark.parametrize("slots", [None, [1, -1]])
def test_launches_know_nothing_but_the_inputs(
    slots: list[int] | None, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what the layer makes itself."""
    model = Model("qwen3_moe")
    launched: list[tuple[str, torch.Tensor]] = []
    grid = GridExecutor.__call__

    def launch(self: Any, *args: Any, **kwargs: Any) -> None:
        for arg in (*args, *kwargs.values()):
            if isinstance(arg, torch.Tensor) and arg.numel() > 0:
                launched.append((self.fn.__name__, arg))
        grid(self, *args, **kwargs)

    own: set[int] = set()

    def checked(run: Callable[[], Tensors]) -> Tensors:
        with monkeypatch.context() as patch, _Operations([]) as operations:
            patch.setattr(GridExecutor, "__call__", launch)
            results = run()
        own.update(operations.made)
        return results

    calls.way = checked
    call = model.run(calls, model.step([2, 1], slots))[0]
    known = {tensor.data_ptr() for tensor in call.inputs}
    others = [
        name
        for name, tensor in launched
        if tensor.data_ptr() not in known and tensor.untyped_storage().data_ptr() not in own
    ]
    assert len(launched) > 50
    assert not others


def test_what_is_not_replayed_as_a_whole(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode rows, views that the tables alone bound, more tokens."""
    model = Model("qwen3_moe")
    with_lora = model.step([3], [0])
    view = with_lora.lora
    assert view is not None
    steps = [model.step([1, 1]), replace(with_lora, lora=replace(view, signature=None))]
    with torch.inference_mode():
        for step in steps:
            model.served.forward(step)
        monkeypatch.setattr(replayed_layer, "MOST_TOKENS", 2)
        model.served.forward(model.step([3]))
    assert not calls
    assert len(model.run(calls, model.step([2]))) == 2
