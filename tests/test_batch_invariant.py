"""`batch_invariant`: a request's answers do not depend on what else runs, bit for bit.

On the CPU, kernels run in Triton's interpreter. Tests marked `gpu` run whole engines, in graphs.
"""

import copy
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_attention import Sizes, make_case
from helpers_engine import FakeTokenizer
from helpers_extras import FOLDER
from test_graphs_model import Models, params, table
from torch.nn import functional

from vexpert.bench.cases import Case
from vexpert.bench.draw import draw
from vexpert.bench.layer import BenchLayer
from vexpert.config import EngineConfig
from vexpert.engine.engine import Engine
from vexpert.errors import ConfigError, UnsupportedError
from vexpert.models.fused_attention import FusedAttention
from vexpert.models.fused_layer import FusedLayer
from vexpert.models.invariant import InvariantProducts
from vexpert.models.loader import serve
from vexpert.models.served import TransformersModel
from vexpert.ops.attention import invariant_attention
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
        "batch_invariant": True, "lora_memory": 1 << 26, "lora_host_memory": 1 << 26,
    }  # fmt: skip
    config = EngineConfig.from_options(**given | options)
    place = torch.device(device)
    model = copy.deepcopy(models.model).to(place, dtype)
    ours = serve(model, models.model.config, config, dtype, place)
    assert isinstance(ours, TransformersModel)
    for layer in ours.layers:
        layer.use_kernels = True
    engine = Engine(config, model=ours, tokenizer=FakeTokenizer())
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


def assert_invariant(engine: Engine, count: int, tokens: int, length: int) -> None:
    """Each request in one batch of all, in chunks beside each other, and alone."""
    together = run(engine, list(range(count)), tokens, length)
    assert len({tuple(t.flatten().tolist()) for t in together.values()}) == count
    for index in range(count):
        alone = run(engine, [index], tokens, length)[index]
        assert torch.equal(alone, together[index]), index


def test_what_a_model_runs(models: Models) -> None:
    """Without a step, which takes the interpreter ten seconds: a GPU runs them below."""
    engine = make_engine(models, "cpu", torch.float32)
    model = engine.model
    assert isinstance(model, TransformersModel)
    assert isinstance(model.products, InvariantProducts)
    assert all(layer.batch_invariant for layer in model.layers)
    forwards = [getattr(module, "forward", None) for module in model.model.modules()]
    attentions = [found for found in forwards if isinstance(found, FusedAttention)]
    layers = [found for found in forwards if isinstance(found, FusedLayer)]
    assert len(attentions) == len(layers) == 2
    assert all(attention.heads.batch_invariant for attention in attentions)
    assert all(layer.scratch is None for layer in layers)


def test_products_of_rows() -> None:
    backend = select_backend("triton", "cpu", torch.float32, batch_invariant=True)
    x, weight, bias = torch.randn(9, 33), torch.randn(20, 33), torch.randn(20)
    batch, one = torch.randn(2, 4, 5), torch.randn(3, 7, 1)
    with InvariantProducts(backend):
        whole = functional.linear(x, weight, bias)
        assert torch.equal(functional.linear(x[None, 4:5], weight, bias)[0], whole[4:5])
        assert torch.equal(x[4:6] @ weight.t(), torch.matmul(x, weight.t())[4:6])
        outer = one @ torch.ones(1, 6)
        with pytest.raises(UnsupportedError, match="is not rows by a weight"):
            torch.bmm(batch, batch.transpose(1, 2))
        with pytest.raises(UnsupportedError, match="einsum is not covered"):
            torch.einsum("ij,kj->ik", x, weight)
    torch.testing.assert_close(whole, functional.linear(x, weight, bias), atol=1e-5, rtol=1e-5)
    assert torch.equal(outer, one.expand(3, 7, 6))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_on_a_gpu(models: Models, dtype: torch.dtype, prefix_caching: bool) -> None:
    engine = make_engine(models, "cuda", dtype, enable_prefix_caching=prefix_caching)
    assert_invariant(engine, 6, tokens=8, length=9)


@pytest.mark.parametrize("mask", [{}, {"window": 7}, {"chunk": 11}], ids=str)
def test_attention_of_a_query_alone_in_chunks_and_in_a_batch(mask: dict[str, int]) -> None:
    sizes = Sizes(2, 3, 16, 16, 4)
    case = make_case([(20, 37), (5, 90), (1, 3)], sizes, torch.float32, "cpu", **mask)

    def attend(first: int, stop: int) -> torch.Tensor:
        """Queries first ... stop of the first sequence, alone."""
        batch = replace(
            case.batch,
            query_starts=torch.tensor([0, stop - first]),
            kv_lens=torch.tensor([17 + stop]),
            block_tables=case.batch.block_tables[:1],
            max_query_len=stop - first,
            max_kv_len=17 + stop,
        )
        query = case.query[first:stop]
        return invariant_attention(query, case.keys, case.values, batch, **case.options)

    whole = invariant_attention(case.query, case.keys, case.values, case.batch, **case.options)
    torch.testing.assert_close(whole, case.expected().to(whole.dtype), atol=1e-5, rtol=1e-5)
    for cuts in ([0, 20], [0, 8, 20], [0, 1, 2, 19, 20]):
        parts = [attend(first, stop) for first, stop in itertools.pairwise(cuts)]
        assert torch.equal(torch.cat(parts), whole[:20]), cuts


def test_experts_of_a_row_alone_and_in_a_batch() -> None:
    device, dtype = torch.device("cpu"), torch.float16
    case = Case("tiny", (4, 8), 4, 40, 4, 0.25)
    backend = select_backend("triton", device, dtype, batch_invariant=True)
    layer, step = BenchLayer(case, device, dtype, backend), draw(case, device, dtype)
    whole = layer.forward(step, with_lora=True)
    for rows in ([3], [10, 11, 30]):
        part = layer.forward(step.rows(torch.tensor(rows)), with_lora=True)
        assert torch.equal(part, whole[rows]), rows


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
