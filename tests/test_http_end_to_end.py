"""The served demo over HTTP with the real `openai` client: many at once, right, and like alone."""

import asyncio
import json
import random
import re
import threading
from itertools import accumulate
from typing import Any

import httpx
import openai
import pytest
from helpers_demo import NAMES, expected, random_words
from helpers_wait import wait_for

from vexpert.demo import adapter_paths

pytest_plugins = ["helpers_demo_server"]
BASE = "vexpert-demo"


async def ask(client: openai.AsyncOpenAI, name: str | None, word: str) -> str:
    answer = await client.chat.completions.create(
        model=name or BASE, messages=[{"role": "user", "content": word}], temperature=0
    )
    return answer.choices[0].message.content or ""


async def ask_all(url: str, questions: list[tuple[str | None, str]], at_once: int) -> list[str]:
    gate = asyncio.Semaphore(at_once)

    async def one(client: openai.AsyncOpenAI, name: str | None, word: str) -> str:
        async with gate:
            return await ask(client, name, word)

    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=120) as client:
        return await asyncio.gather(*(one(client, name, word) for name, word in questions))


def test_two_hundred_concurrent_requests_are_right_and_equal_one_by_one(url: str) -> None:
    rng = random.Random(3)
    questions = [(rng.choice(NAMES), word) for word in random_words(200, seed=3)]
    together = asyncio.run(ask_all(url, questions, at_once=200))
    right = sum(
        answer == expected(*question) for answer, question in zip(together, questions, strict=True)
    )
    assert right >= 198
    assert together == asyncio.run(ask_all(url, questions, at_once=1))


def test_offsets_of_a_stream_are_those_of_the_whole_answer(url: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    for stop in (["lox"], ["llo"], None):
        asked: Any = {"model": BASE, "prompt": "hellolx", "stop": stop, "logprobs": 1}
        asked |= {"temperature": 0}
        whole = client.completions.create(**asked, max_tokens=9, extra_body={"ignore_eos": True})
        stream = client.completions.create(
            **asked, max_tokens=9, stream=True, extra_body={"ignore_eos": True}
        )
        chunks = [chunk.choices[0].logprobs for chunk in stream if chunk.choices]
        parts = [each.text_offset or [] for each in chunks if each is not None]
        offsets = [offset for part in parts for offset in part]
        expected = whole.choices[0].logprobs
        assert expected is not None
        assert offsets == expected.text_offset
        lengths = map(len, (expected.tokens or [])[:-1])
        assert offsets == list(accumulate(lengths, initial=0))


@pytest.mark.parametrize("prompt", ["h\N{GRINNING FACE}\u65e5e", "plain"])
def test_offsets_of_an_echo_lie_in_the_text(url: str, prompt: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    answer = client.completions.create(
        model=BASE, prompt=prompt, max_tokens=2, echo=True, logprobs=0, temperature=0
    ).choices[0]
    assert answer.logprobs is not None
    offsets, tokens = answer.logprobs.text_offset or [], answer.logprobs.tokens or []
    begin = len(tokens) - len(prompt) - 2  # what the tokenizer puts in front has no text
    assert offsets[begin:] == list(range(len(prompt) + 2))
    assert set(offsets[:begin]) <= {0}
    for offset, token in zip(offsets[begin:], tokens[begin:], strict=True):
        assert answer.text[offset : offset + 1] in (token, "\N{GRINNING FACE}", "\u65e5", "")


@pytest.mark.parametrize("echo", [False, True])
def test_hidden_tokens_take_no_place_in_the_text(url: str, echo: bool) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    for shown in (False, True):
        more = {"ignore_eos": True, "skip_special_tokens": not shown}
        answer = client.completions.create(
            model="upper", prompt=[1, 2, 3], echo=echo, max_tokens=6, logprobs=0, temperature=0,
            extra_body=more,
        ).choices[0]  # fmt: skip
        assert answer.logprobs is not None
        offsets, tokens = answer.logprobs.text_offset or [], answer.logprobs.tokens or []
        begin = len(tokens) - 6  # of the completion
        assert any(len(token) > 1 for token in tokens[begin:])  # special ones
        ends = [*offsets[1:], len(answer.text)]
        pieces = [answer.text[a:b] for a, b in zip(offsets, ends, strict=True)]
        is_hidden = [not shown and i >= begin and len(each) > 1 for i, each in enumerate(tokens)]
        assert pieces == ["" if h else t for h, t in zip(is_hidden, tokens, strict=True)]


@pytest.mark.parametrize("prompt", ["ab", [97, 98]])
def test_offsets_of_an_echo_are_each_completions_own(url: str, prompt: Any) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    asked: dict[str, Any] = {"model": "upper", "prompt": [prompt] * 2, "echo": True, "logprobs": 0}
    asked |= {"max_tokens": 2, "temperature": 0, "extra_body": {"ignore_eos": True}}
    alone = client.completions.create(**(asked | {"prompt": prompt})).choices[0].logprobs
    together = client.completions.create(**asked, n=3).choices
    assert alone is not None
    assert len(alone.text_offset or []) == len(alone.tokens or [])
    assert len(together) == 6
    for choice in together:
        assert choice.logprobs is not None
        assert (choice.logprobs.tokens, choice.logprobs.text_offset) == (
            alone.tokens,
            alone.text_offset,
        )


def test_models_list_adapters_with_their_parent(url: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    cards = {card.id: card.model_dump() for card in client.models.list()}
    assert set(cards) == {BASE, "upper", "reverse", "sort", "shift"}
    assert cards["upper"]["parent"] == BASE
    assert cards["upper"]["root"].endswith("upper")


def test_an_unknown_model_is_404_and_never_answered_by_base(url: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    with pytest.raises(openai.NotFoundError, match="nobody"):
        client.chat.completions.create(model="nobody", messages=[{"role": "user", "content": "a"}])


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/chat/completions", b"{", 400),
        ("/v1/completions", b'{"model": "vexpert-demo", "prompt": "a", "nonsense": 1}', 400),
        ("/v1/completions", b'{"model": "vexpert-demo", "prompt": "a", "temperature": -1}', 400),
        ("/v1/completions", b'{"model": "vexpert-demo", "prompt": "a", "top_p": 7}', 400),
        ("/v1/completions", b'{"model": "vexpert-demo", "prompt": "%s"}' % (b"a" * 9000), 400),
        ("/v1/load_lora_adapter", b'{"lora_name": "x", "lora_path": "/no/such/folder"}', 400),
        ("/v1/load_lora_adapter", b'{"lora_name": "x", "lora_path": "/tmp"}', 400),
        ("/v1/unload_lora_adapter", b'{"lora_name": "x"}', 404),
    ],
)
def test_bad_input_is_a_4xx_with_a_cause(url: str, path: str, body: bytes, status: int) -> None:
    headers = {"Content-Type": "application/json"}
    reply = httpx.post(url + path, content=body, headers=headers, timeout=60)
    assert reply.status_code == status, reply.text
    assert len(reply.json()["error"]["message"]) > 10
    assert httpx.get(url + "/health", timeout=60).status_code == 200
    assert asyncio.run(ask_all(url, [("upper", "still")], 1)) == ["STILL"]


def test_an_adapter_loads_answers_and_unloads(url: str) -> None:
    import vexpert.demo

    path = str(vexpert.demo.adapter_paths()["reverse"])
    body = {"lora_name": "back", "lora_path": path}
    loaded = httpx.post(url + "/v1/load_lora_adapter", json=body, timeout=60)
    assert loaded.status_code == 200, loaded.text
    assert asyncio.run(ask_all(url, [("back", "hello")], 1)) == ["olleh"]
    gone = httpx.post(url + "/v1/unload_lora_adapter", json={"lora_name": "back"}, timeout=60)
    assert gone.status_code == 200, gone.text
    with pytest.raises(openai.NotFoundError):
        asyncio.run(ask_all(url, [("back", "hello")], 1))


def running(url: str) -> float:
    """Sequences that the engine computes."""
    page = httpx.get(f"{url}/metrics", timeout=60).text
    return sum(map(float, re.findall(r"^vllm:num_requests_running\{.*\} (.*)$", page, re.M)))


def test_requests_of_an_adapter_that_has_to_end_get_503(url: str) -> None:
    """Whole and in a stream; with so many answers they do not end before."""
    body = {"model": "gone", "prompt": "x", "ignore_eos": True, "max_tokens": 400, "n": 100}
    answers: list[httpx.Response] = []
    with httpx.Client(base_url=url, timeout=60) as http:
        load = {"lora_name": "gone", "lora_path": str(adapter_paths()["upper"])}
        assert http.post("/v1/load_lora_adapter", json=load).status_code == 200
        whole = threading.Thread(
            target=lambda: answers.append(http.post("/v1/completions", json=body))
        )
        whole.start()
        with http.stream("POST", "/v1/completions", json=body | {"stream": True}) as stream:
            lines = stream.iter_lines()
            next(lines)
            wait_for(lambda: running(url) == 200)  # both
            end = {"lora_name": "gone", "lora_int_id": 7, "drain_seconds": 0}
            assert http.post("/v1/unload_lora_adapter", json=end).status_code == 200
            events = [line.removeprefix("data: ") for line in lines if line]
        whole.join()
    told = json.loads(events[-2])["error"]
    assert (told["type"], told["code"]) == ("server_error", "adapter_gone")
    assert answers[0].status_code == 503
    assert answers[0].json()["error"] == told
    assert "'gone' was unloaded" in told["message"]
