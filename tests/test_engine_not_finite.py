"""Logits without a finite value end their own request, with an error, and no other."""

import json
from collections.abc import Iterator

import pytest
import torch
from helpers_engine import VOCAB, FakeModel, greedy, make_engine, manager_of, run_all
from helpers_server import FakeEngine, RunningServer, make_fake_engine, serving
from safetensors.torch import load_file

import vexpert.demo
from vexpert import LLM
from vexpert.engine.engine import Engine
from vexpert.engine.outputs import RequestOutput
from vexpert.engine.sampler import NO_TOKEN, Sampler
from vexpert.engine.sampler_state import SamplerState
from vexpert.engine.sampling_params import SamplingParams
from vexpert.errors import RequestError
from vexpert.models.types import StepInput

INF, NAN = float("inf"), float("nan")
PROMPT = [5, 9, 13, 20, 31]
WAYS = [
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 0.0, "logit_bias": {3: 1.0}},
    {"temperature": 1.0},
    {"temperature": 1.0, "top_k": 3, "logprobs": 2},
    {"temperature": 1.0, "top_p": 0.5},
    {"temperature": 1.0, "min_p": 0.1, "top_p": 0.5, "top_k": 5},
]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("bad", ["nan", "inf", "none", "all"])
def test_a_row_without_a_distribution_has_no_token(way: dict, bad: str) -> None:
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(1))
    rows = [SamplerState(SamplingParams(seed=3, **way), [], (1,)) for _ in range(3)]
    before = Sampler(0).sample(logits, rows)
    rows = [SamplerState(SamplingParams(seed=3, **way), [], (1,)) for _ in range(3)]
    match bad:
        case "nan":
            logits[1, 7] = NAN
        case "inf":
            logits[1, 7] = INF
        case "none":
            logits[1] = -INF
        case "all":
            logits[1] = NAN
    after = Sampler(0).sample(logits, rows)
    assert after.token_ids == [before.token_ids[0], NO_TOKEN, before.token_ids[2]]
    assert (after.logprobs[0], after.logprobs[2]) == (before.logprobs[0], before.logprobs[2])


def poison(engine: Engine, adapter: str) -> None:
    """All logits of `adapter` are NaN from now on."""
    forward, manager = engine.model.forward, manager_of(engine)

    def broken(step: StepInput) -> torch.Tensor:
        logits = forward(step)
        if step.lora is not None:
            for row, slot in enumerate(step.lora.logit_slots.tolist()):
                if slot >= 0 and manager.in_slot[slot].name == adapter:
                    logits[row] = NAN
        return logits

    engine.model.forward = broken  # type: ignore[method-assign]


@pytest.mark.parametrize(
    "way", [*WAYS, {"n": 3}, {"prompt_logprobs": 1}, {"prompt_logprobs": 1, "n": 2}]
)
def test_only_the_request_of_the_broken_adapter_fails(way: dict) -> None:
    def run(engine: Engine) -> dict[str, RequestOutput]:
        engine.add_request("base", None, PROMPT, greedy(6))
        engine.add_request("green", None, PROMPT, greedy(6), "green")
        engine.add_request("red", None, PROMPT, SamplingParams(**way), "red")
        return run_all(engine)

    good, engine = run(make_engine()), make_engine()
    poison(engine, "red")
    outputs = run(engine)
    red = outputs.pop("red")
    assert red.finished
    assert "adapter 'red': its weights give no finite logits" in str(red.error)
    assert {part.finish_reason for part in red.outputs} == {"abort"}
    assert outputs == {name: good[name] for name in outputs}
    assert engine.stats().kv_blocks_used == 0


def test_options_that_leave_no_token_are_blamed() -> None:
    engine = make_engine()
    params = SamplingParams(stop_token_ids=list(range(VOCAB)), min_tokens=2)
    engine.add_request("none", None, PROMPT, params)
    engine.add_request("other", None, PROMPT, greedy(3))
    outputs = run_all(engine)
    assert "relax min_tokens" in str(outputs["none"].error)
    assert outputs["other"].error is None


def test_generate_raises_and_names_the_adapter() -> None:
    llm = LLM.from_engine(make_engine())
    poison(llm.engine, "red")
    with pytest.raises(RequestError, match="adapter 'red': its weights give no finite logits"):
        llm.generate(["a", "b"], greedy(4), adapter=["green", "red"])
    assert not llm.engine.has_unfinished()
    assert llm.generate("a", greedy(4), adapter="green")[0].finished


def test_unused_places_of_a_block_table_belong_to_the_sequence() -> None:
    engine = make_engine()
    model = engine.model
    assert isinstance(model, FakeModel)
    model.record = True
    engine.add_request("long", None, [5] * 30, greedy(4))
    engine.add_request("short", None, [6] * 3, greedy(4))
    run_all(engine)
    both = [step.block_tables for step in model.steps if len(step.block_tables) == 2]
    assert len(both) >= 3
    assert all(not set(table[0].tolist()) & set(table[1].tolist()) for table in both)


@pytest.fixture(scope="module")
def demo() -> LLM:
    """The demo, and one of its adapters with weights of 1e30, which the reader would refuse."""
    source = vexpert.demo.adapter_paths()["upper"]
    config = json.loads((source / "adapter_config.json").read_text())
    tensors = load_file(source / "adapter_model.safetensors")
    huge = {key: torch.full_like(tensor, 1e30) for key, tensor in tensors.items()}
    llm = LLM(dtype="float32", device="cpu", max_num_seqs=8)
    llm.load_adapter("upper", str(source))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vexpert.lora.formats.context.LARGEST_CHANGE", float("inf"))
        llm.load_adapter("huge", tensors=huge, config=config)
    return llm


def test_huge_weights_of_a_real_model(demo: LLM) -> None:
    chat = [{"role": "user", "content": "hello"}]
    for params in (greedy(4), SamplingParams(seed=1), SamplingParams(logprobs=2)):
        with pytest.raises(RequestError, match="adapter 'huge'"):
            demo.chat([chat, chat], params, adapter=["upper", "huge"])
    answer = demo.chat(chat, SamplingParams(temperature=0), adapter="upper")[0].outputs[0]
    assert answer.text == "HELLO"
    demo.engine.check_integrity()


class FailingEngine(FakeEngine):
    """Gives up on every request of the adapter `shift`."""

    def _advance(self, request: object) -> RequestOutput:
        output = super()._advance(request)
        if output.adapter == "shift":
            self.requests.pop(output.request_id, None)
            output.finished, output.error = True, "adapter 'shift': no finite logits"
            for part in output.outputs:
                part.finish_reason = "abort"
        return output


@pytest.fixture(scope="module")
def failing() -> Iterator[RunningServer]:
    engine = FailingEngine()
    for info in make_fake_engine().adapters():
        engine.load_adapter(info.name, "bundled")
    with serving(engine) as running:
        yield running


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("n", [1, 2])
def test_the_server_answers_with_an_error_object(failing: RunningServer, path: str, n: int) -> None:
    prompt = {"prompt": "hello", "messages": [{"role": "user", "content": "hello"}]}
    del prompt["messages" if path == "/v1/completions" else "prompt"]
    body = {"model": "shift", "n": n, **prompt}
    response = failing.post(path, json=body)
    assert response.status_code == 400
    assert response.json()["error"]["message"] == "adapter 'shift': no finite logits"
    streamed = failing.post(path, json={**body, "stream": True})
    events = [line[6:] for line in streamed.text.splitlines() if line]
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["error"]["message"] == "adapter 'shift': no finite logits"
    assert failing.ask("upper", "hello") == "HELLO"
