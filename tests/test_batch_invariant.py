"""`batch_invariant`: a request's answers do not depend on what else runs, bit for bit.

On the CPU a few steps run in Triton's interpreter. Tests marked `gpu` run many, in graphs.
"""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_engine import EagerCapturer, FakeTokenizer
from helpers_extras import FOLDER
from test_graphs_model import Models, params, table

from vexpert.config import EngineConfig
from vexpert.engine.engine import Engine
from vexpert.errors import ConfigError, UnsupportedError
from vexpert.models.loader import serve
from vexpert.models.served import TransformersModel
from vexpert.ops.backend import select_backend
from vexpert.ops.plan_rows import packaged

NAMES = [None, "all", "other", "attention", "all", None]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("adapters"))


def make_engine(models: Models, device: str, dtype: torch.dtype, **options: Any) -> Engine:
    given: dict[str, Any] = {
        "model": FOLDER, "device": device, "dtype": str(dtype).removeprefix("torch."),
        "max_lora_rank": 8, "max_num_seqs": 8, "max_num_batched_tokens": 48, "max_model_len": 96,
        "block_size": 4, "kv_cache_memory": 1 << 20, "lora_backend": "triton", "warm_up": "none",
        "batch_invariant": True,
    }  # fmt: skip
    config = EngineConfig.from_options(**given | options)
    place = torch.device(device)
    model = copy.deepcopy(models.model).to(place, dtype)
    ours = serve(model, models.model.config, config, dtype, place)
    assert isinstance(ours, TransformersModel)
    for layer in ours.layers:
        layer.use_kernels = True
    capturer = EagerCapturer() if device == "cpu" else None
    engine = Engine(config, model=ours, tokenizer=FakeTokenizer(), capturer=capturer)
    for name, path in models.paths.items():
        engine.load_adapter(name, str(path))
    return engine


def prompt_of(index: int, length: int) -> list[int]:
    return [5, 9, 3, 14, 7, 39, *((7 * index + 5 * i) % 50 + 3 for i in range(length))]


def run(engine: Engine, indices: list[int], tokens: int, length: int) -> dict[int, torch.Tensor]:
    """Log-probabilities [tokens, V] of requests `indices`, all in one batch."""
    for index in indices:
        prompt = prompt_of(index, length * (index + 1))
        name = NAMES[index % len(NAMES)]
        engine.add_request(str(index), None, prompt, params(tokens), name)
    last = {}
    while engine.has_unfinished():
        last |= {output.request_id: output for output in engine.step()}
    return {index: table(last[str(index)]) for index in indices}


def assert_invariant(
    engine: Engine, count: int, tokens: int, length: int, checked: range | None = None
) -> None:
    """Each `checked` request in one batch of all, in chunks beside each other, and alone."""
    together = run(engine, list(range(count)), tokens, length)
    assert len({tuple(t.flatten().tolist()) for t in together.values()}) == count
    for index in checked or range(count):
        alone = run(engine, [index], tokens, length)[index]
        assert torch.equal(alone, together[index]), index


def test_in_the_interpreter(models: Models) -> None:
    engine = make_engine(models, "cpu", torch.float32, max_num_seqs=3, max_num_batched_tokens=12)
    assert_invariant(engine, 2, tokens=1, length=1, checked=range(1, 2))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_on_a_gpu(models: Models, dtype: torch.dtype, prefix_caching: bool) -> None:
    engine = make_engine(models, "cuda", dtype, enable_prefix_caching=prefix_caching)
    assert_invariant(engine, 6, tokens=8, length=9)


@pytest.mark.parametrize("backend", ["torch", "numba"])
def test_libraries_are_refused_with_the_reason(backend: str) -> None:
    with pytest.raises(UnsupportedError, match="another number of rows"):
        select_backend(backend, "cpu", torch.float32, batch_invariant=True)


def test_what_does_not_go_together(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs lora_use_virtual_experts"):
        EngineConfig(batch_invariant=True, lora_use_virtual_experts=False)
    with pytest.raises(ConfigError, match="leave out one of them"):
        select_backend("triton", "cpu", torch.float32, str(tmp_path / "x.json"), True)


def test_every_step_has_the_same_plans() -> None:
    assert packaged("invariant_").is_batch_invariant
    assert not packaged().is_batch_invariant
