"""The demo model with its adapters, through the Python API: real files, real engine."""

import random

import pytest
from helpers_demo import NAMES, expected, random_words

import vexpert.demo
from vexpert import LLM, SamplingParams
from vexpert.errors import AdapterError, AdapterNotFoundError

GREEDY = SamplingParams(temperature=0, max_tokens=20)


def make_llm(**options: object) -> LLM:
    llm = LLM(dtype="float32", device="cpu", max_num_seqs=64, **options)
    for name, path in vexpert.demo.adapter_paths().items():
        llm.load_adapter(name, str(path))
    return llm


@pytest.fixture(scope="module")
def llm() -> LLM:
    return make_llm()


def ask(llm: LLM, words: list[str], names: list[str | None]) -> list[str]:
    chats = [[{"role": "user", "content": word}] for word in words]
    return [output.outputs[0].text for output in llm.chat(chats, GREEDY, adapter=names)]


def test_five_names_give_five_answers(llm: LLM) -> None:
    names = list(NAMES)
    answers = ask(llm, ["hello"] * 5, names)
    assert answers == [expected(name, "hello") for name in names]


def test_a_mixed_batch_is_right_and_equals_one_by_one(llm: LLM) -> None:
    words = random_words(100, seed=7)
    names = random.Random(7).choices(NAMES, k=len(words))
    mixed = ask(llm, words, names)
    right = sum(
        answer == expected(name, word)
        for answer, word, name in zip(mixed, words, names, strict=True)
    )
    assert right >= 99
    alone = [ask(llm, [word], [name])[0] for word, name in zip(words, names, strict=True)]
    assert mixed == alone


def test_the_per_adapter_path_gives_the_same_answers(llm: LLM) -> None:
    classic = make_llm(lora_use_virtual_experts=False)
    words = random_words(20, seed=8)
    names = [NAMES[i % 5] for i in range(20)]
    assert ask(classic, words, names) == ask(llm, words, names)


def test_two_slots_serve_four_adapters() -> None:
    llm = make_llm(max_loras=2)
    words = random_words(30, seed=9)
    names = [NAMES[i % 5] for i in range(30)]
    answers = ask(llm, words, names)
    wanted = [expected(name, word) for name, word in zip(names, words, strict=True)]
    assert sum(a == w for a, w in zip(answers, wanted, strict=True)) >= 29


def test_a_reloaded_name_answers_with_the_new_version() -> None:
    paths = vexpert.demo.adapter_paths()
    llm = LLM(dtype="float32", device="cpu")
    llm.load_adapter("x", str(paths["upper"]))
    assert ask(llm, ["hello"], ["x"]) == ["HELLO"]
    llm.load_adapter("x", str(paths["reverse"]), load_inplace=True)
    assert ask(llm, ["hello"], ["x"]) == ["olleh"]
    llm.unload_adapter("x")
    with pytest.raises(AdapterNotFoundError, match="x"):
        ask(llm, ["hello"], ["x"])


def test_an_adapter_that_is_none_is_refused_and_the_rest_goes_on(
    llm: LLM, tmp_path: object
) -> None:
    with pytest.raises(AdapterError):
        llm.load_adapter("nothing", str(tmp_path))
    assert ask(llm, ["hello"], ["upper"]) == ["HELLO"]
