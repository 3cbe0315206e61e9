"""Prompts on a GPU: layers replayed as a whole give the bits of layers that are run."""

from typing import Any

import pytest
from test_graphs_model import Models

from vexpert.engine.engine import Engine
from vexpert.engine.sampling_params import SamplingParams
from vexpert.kernels.replay import Replays
from vexpert.models.fused_layer import FusedLayer
from vexpert.models.served import TransformersModel

pytestmark = pytest.mark.gpu

LENGTHS = ([40], [57], [40], [33, 50, 1], [40, 2], [90])
NAMES = [[None], ["all"], ["all", None, "other"], ["attention", "all"]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("adapters"))


def make_engine(models: Models) -> Engine:
    sizes = {"max_num_batched_tokens": 64, "max_model_len": 128, "kv_cache_memory": 4 << 20}
    return models.engine("cuda", with_graphs=False, enable_prefix_caching=False, **sizes)


def entries(engine: Engine) -> dict[Any, Any]:
    """The programs of the model's layers."""
    served = engine.model
    assert isinstance(served, TransformersModel)
    forwards = [getattr(module, "forward", None) for module in served.model.modules()]
    layers = [forward for forward in forwards if isinstance(forward, FusedLayer)]
    return layers[0].replayed._shared.replays._entries


def play(engine: Engine) -> list[tuple[list[int], str]]:
    """Tokens and log-probabilities of all requests; 90 tokens come in chunks."""
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, logprobs=5)
    found = []
    for lengths in LENGTHS:
        for names in NAMES:
            last = {}
            for i, length in enumerate(lengths):
                prompt = [(7 * i + 3 * j) % 40 + 3 for j in range(length)]
                engine.add_request(str(i), None, prompt, params, names[i % len(names)])
            while engine.has_unfinished():
                last |= {output.request_id: output for output in engine.step()}
            for i in range(len(lengths)):
                output = last[str(i)].outputs[0]
                found.append((list(output.token_ids), str(output.logprobs)))
    return found


def test_layers_of_prompts(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(models)
    replayed = play(engine)
    programs = [entry.program for entry in entries(engine).values() if entry.is_trusted]
    assert len(programs) > 4
    assert all(program is not None for program in programs)
    monkeypatch.setattr(
        Replays, "__call__", lambda self, owner, key, inputs, run, unsaid=None: run()
    )
    assert play(make_engine(models)) == replayed
