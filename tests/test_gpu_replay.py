"""Replays on a GPU: bits of what is replayed are those of what is run."""

import pytest
import torch
from helpers_lora import bits
from helpers_moe import Hooks, make_layer

from vexpert.kernels.replay import Replays
from vexpert.moe.runner import MoeRunner
from vexpert.ops.backend import select_backend
from vexpert.ops.experts_replay import EXPERTS

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("tokens", [1, 40, 300, 513])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("has_lora", [False, True])
def test_experts(
    tokens: int, dtype: torch.dtype, has_lora: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = make_layer(tokens, 2, 20, 8, None, dtype, "cuda", sentinel_share=0.2)
    backend = select_backend("triton", "cuda", dtype)
    runner = MoeRunner(layer.weights, backend)
    hooks = Hooks(layer, backend).hooks if has_lora else None
    steps = [torch.randn_like(layer.hidden) for _ in range(5)]
    EXPERTS._entries.clear()

    def all_steps() -> list[torch.Tensor]:
        rest = layer.topk_ids, layer.topk_weights, hooks
        return [runner(hidden, *rest).clone() for hidden in steps]

    replayed = all_steps()
    assert [(e.is_trusted, e.program is None) for e in EXPERTS._entries.values()] == [(True, False)]
    monkeypatch.setattr(
        Replays, "__call__", lambda self, owner, key, inputs, run, unsaid=None: run()
    )
    for got, want in zip(replayed, all_steps(), strict=True):
        assert torch.equal(bits(got), bits(want))
