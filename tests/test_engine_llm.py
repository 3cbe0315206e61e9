"""The Python API: prompts of all shapes, order, adapters, and nothing left behind."""

from collections.abc import Iterator

import pytest
from helpers_engine import FakeTokenizer, greedy, llm_left_idle, make_engine, run_one
from transformers.utils import logging

from vexpert.engine.llm import LLM
from vexpert.engine.sampling_params import SamplingParams
from vexpert.errors import AdapterNotFoundError, ConfigError, RequestError


@pytest.fixture
def llm() -> Iterator[LLM]:
    yield from llm_left_idle()


def test_one_prompt_gives_a_list_of_one(llm: LLM) -> None:
    (output,) = llm.generate("hello", greedy(4))
    assert output.finished
    assert output.prompt == "hello"
    assert output.prompt_token_ids == llm.get_tokenizer().encode("hello")
    assert output.adapter is None
    assert len(output.outputs[0].token_ids) == 4


def test_all_shapes_of_prompts_in_order(llm: LLM) -> None:
    ids = llm.get_tokenizer().encode("hello")
    prompts = ["a", "hello", {"prompt": "hello"}, {"prompt_token_ids": ids}, "bb"]
    lengths = [9, 3, 3, 3, 1]
    outputs = llm.generate(prompts, [greedy(length) for length in lengths])
    assert [len(o.outputs[0].token_ids) for o in outputs] == lengths
    assert outputs[1].outputs[0].text == outputs[2].outputs[0].text == outputs[3].outputs[0].text
    assert [o.prompt for o in outputs] == ["a", "hello", "hello", None, "bb"]
    assert llm.generate([], greedy()) == []


def test_default_params_are_vllms(llm: LLM) -> None:
    (output,) = llm.generate({"prompt_token_ids": [4, 5]})
    assert 1 <= len(output.outputs[0].token_ids) <= SamplingParams().max_tokens == 16


def test_one_adapter_for_each_prompt(llm: LLM) -> None:
    names = ["red", None, "green", "red"]
    outputs = llm.generate(["same"] * 4, greedy(6), adapter=names)
    assert [o.adapter for o in outputs] == names
    texts = [o.outputs[0].text for o in outputs]
    assert texts[0] == texts[3]
    assert len(set(texts)) == 3
    assert llm.generate("same", greedy(6), adapter="green")[0].outputs[0].text == texts[2]


@pytest.mark.parametrize(
    ("prompts", "params", "adapter", "error", "words"),
    [
        (["ok", {"prompt_token_ids": []}], greedy(), None, RequestError, "empty"),
        (["ok", {"prompt_token_ids": [3] * 70}], greedy(), None, RequestError, "70 tokens"),
        (["ok", 5], greedy(), None, RequestError, "prompt 5"),
        ([3, 4], greedy(), None, RequestError, "prompt_token_ids"),
        (["ok", {"tokens": [3]}], greedy(), None, RequestError, "prompt_token_ids"),
        (["ok", "ok"], [greedy()], None, RequestError, "1 for 2 prompts"),
        (["ok", "ok"], greedy(), ["red"], RequestError, "adapter: 1 for 2"),
        (["ok", "ok"], greedy(), [None, "violet"], AdapterNotFoundError, "violet"),
    ],
)
def test_one_bad_prompt_refuses_the_batch_before_it_runs(
    llm: LLM, prompts: list, params: object, adapter: object, error: type, words: str
) -> None:
    with pytest.raises(error, match=words):
        llm.generate(prompts, params, adapter=adapter)
    assert llm.engine.stats().steps == 0


def test_an_interrupt_aborts_the_requests(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    step, steps = llm.engine.step, iter(range(3))

    def interrupted() -> list:
        if next(steps) == 2:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(llm.engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b"], greedy(9), adapter="red")
    monkeypatch.undo()
    assert llm.engine.stats().kv_blocks_used == 0
    assert llm.generate("a", greedy(3))[0].finished


def test_chat_of_one_conversation_and_of_many(llm: LLM) -> None:
    one = [{"role": "user", "content": "hi"}]
    two = [{"role": "user", "content": "ho"}]
    (single,) = llm.chat(one, greedy(4))
    assert single.prompt == "user:hi;"
    both = llm.chat([two, one], greedy(4), adapter=[None, None])
    assert [o.prompt for o in both] == ["user:ho;", "user:hi;"]
    assert both[1].outputs[0].text == single.outputs[0].text


def test_chat_without_a_template_is_refused(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeTokenizer, "chat_template", None)
    with pytest.raises(RequestError, match="no chat template"):
        llm.chat([{"role": "user", "content": "hi"}])


def test_adapters_come_and_go(llm: LLM) -> None:
    info = llm.load_adapter("pink", "pink")
    assert info.name == "pink"
    assert "pink" in {adapter.name for adapter in llm.adapters()}
    (output,) = llm.generate("same", greedy(5), adapter="pink")
    assert (
        output.outputs[0].text
        == run_one(make_engine(adapters=("pink",)), output.prompt_token_ids, greedy(5), "pink")
        .outputs[0]
        .text
    )
    llm.unload_adapter("pink")
    with pytest.raises(AdapterNotFoundError):
        llm.generate("same", greedy(5), adapter="pink")


def test_a_progress_bar_counts_requests(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    logging.disable_progress_bar()  # transformers' own bars
    try:
        llm.generate(["a", "b", "c"], greedy(2), use_tqdm=True)
    finally:
        logging.enable_progress_bar()
    assert "3/3" in capsys.readouterr().err


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_num_seqs"):
        LLM(max_num_seq=3)
