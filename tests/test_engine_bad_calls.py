"""Whatever the Python API is called with, the error is one of its own, and nothing is left."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers_engine import greedy, llm_left_idle

from vexpert.demo import adapter_paths
from vexpert.engine.llm import LLM
from vexpert.errors import AdapterError, AdapterNotFoundError, RequestError

SURROGATE = "a\ud800b"


@pytest.fixture
def llm() -> Iterator[LLM]:
    yield from llm_left_idle()


@pytest.mark.parametrize(
    "prompts",
    [
        None,
        5,
        b"bytes",
        [None],
        [5],
        [[3, 4]],
        SURROGATE,
        ["ok", SURROGATE],
        {},
        {"prompt": None},
        {"prompt": 5},
        {"prompt": [3]},
        {"prompt": "a", "prompt_token_ids": [3]},
        {"prompt_token_ids": None},
        {"prompt_token_ids": 5},
        {"prompt_token_ids": "ab"},
        {"prompt_token_ids": [True, False]},
        {"prompt_token_ids": [3.0]},
        {"prompt_token_ids": [10**5000]},
        {"prompt_token_ids": [[3]]},
    ],
    ids=range(20),
)
def test_bad_prompts(llm: LLM, prompts: Any) -> None:
    with pytest.raises(RequestError):
        llm.generate(prompts, greedy(2))


@pytest.mark.parametrize("params", [[None], {}, {"n": 1}, 5, "greedy", ["greedy"], [{}], [greedy]])
def test_bad_params(llm: LLM, params: Any) -> None:
    with pytest.raises(RequestError, match="sampling_params"):
        llm.generate(["a"], params)
    with pytest.raises(RequestError, match="sampling_params"):
        llm.chat([{"role": "user", "content": "a"}], params)


@pytest.mark.parametrize("adapter", [5, [5], {}, [["red"]], b"red", True])
def test_bad_adapters(llm: LLM, adapter: Any) -> None:
    with pytest.raises(RequestError, match="adapter"):
        llm.generate(["a"], greedy(2), adapter=adapter)


@pytest.mark.parametrize(
    "messages",
    [
        None,
        5,
        "hello",
        {"role": "user", "content": "a"},
        [[]],
        [None],
        ["hello"],
        [[None]],
        [{}],
        [{"role": "user"}],
        [{"content": "a"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": 5}],
        [{"role": 5, "content": "a"}],
        [{"role": "user", "content": SURROGATE}],
        [{"role": "user", "content": "a"}, None],
    ],
    ids=lambda value: ascii(value)[:40],
)
def test_bad_messages(llm: LLM, messages: Any) -> None:
    with pytest.raises(RequestError):
        llm.chat(messages, greedy(2))


def test_no_conversation_gives_no_output(llm: LLM) -> None:
    assert llm.chat([], greedy(2)) == []


@pytest.fixture(scope="module")
def demo() -> LLM:
    return LLM(dtype="float32", device="cpu", max_num_seqs=4)


GOOD = str(adapter_paths()["upper"])


@pytest.mark.parametrize(
    ("name", "path"),
    [
        *[(name, GOOD) for name in (None, 5, "", ["a"], b"a", "a" * 257, SURROGATE, "a\n")],
        *[
            ("fine", path)
            for path in (None, 5, "", b"/", "a" * 300, "/no/" * 3000, "a\0b", SURROGATE, ["a"])
        ],
    ],
    ids=lambda value: ascii(value)[:20],
)
def test_bad_adapter_names_and_paths(demo: LLM, name: Any, path: Any) -> None:
    with pytest.raises(AdapterError):
        demo.load_adapter(name, path)
    assert demo.adapters() == []


@pytest.mark.parametrize("name", [None, 5, ["a"], "nobody", SURROGATE, "a" * 10_000])
def test_unloading_what_is_not_there(demo: LLM, name: Any) -> None:
    with pytest.raises(AdapterNotFoundError):
        demo.unload_adapter(name)


@pytest.mark.parametrize("layout", [5, ["a"], "other"])
def test_bad_layouts(demo: LLM, layout: Any) -> None:
    with pytest.raises(AdapterError):
        demo.load_adapter("fine", GOOD, lora_B_layout=layout)
    assert demo.adapters() == []


def test_a_path_object_and_a_long_name_are_fine(demo: LLM) -> None:
    assert demo.load_adapter("a" * 256, Path(GOOD)).name == "a" * 256  # type: ignore[arg-type]
    demo.unload_adapter("a" * 256)
