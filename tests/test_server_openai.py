"""The contract with OpenAI's own client: the demo's five names, whole and streamed."""

import asyncio
import json
from typing import Any

import openai
import pytest
from helpers_server import BASE, NAMES, RunningServer, right_answer

pytest_plugins = ["helpers_server_fixtures"]
WORD = "hello"
MESSAGES: Any = [{"role": "user", "content": WORD}]


@pytest.mark.parametrize("model", [BASE, *NAMES])
def test_each_name_answers_its_own_way(server: RunningServer, model: str) -> None:
    with server.client() as client:
        answer = client.chat.completions.create(model=model, messages=MESSAGES, temperature=0)
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content) == ("assistant", right_answer(model, WORD))
    assert choice.finish_reason == "stop"
    assert (answer.object, answer.model) == ("chat.completion", model)


@pytest.mark.parametrize("model", [BASE, *NAMES])
def test_stream_equals_whole(server: RunningServer, model: str) -> None:
    with server.client() as client:
        chunks = list(
            client.chat.completions.create(
                model=model,
                messages=MESSAGES,
                temperature=0,
                stream=True,
                stream_options={"include_usage": True},
            )
        )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1
    parts = [chunk.choices[0] for chunk in chunks[:-1]]
    assert "".join(part.delta.content or "" for part in parts) == right_answer(model, WORD)
    assert [part.finish_reason for part in parts if part.finish_reason] == ["stop"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens >= 1


def test_usage_counts_every_token(server: RunningServer) -> None:
    with server.client() as client:
        answer = client.completions.create(
            model=BASE,
            prompt=[5, 6, 7],
            max_tokens=4,
            temperature=0,
            extra_body={"ignore_eos": True},
        )
    usage = answer.usage
    assert usage is not None
    counts = (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens)
    assert counts == (3, 4, 7)
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens is not None
    assert answer.choices[0].finish_reason == "length"


def test_several_prompts_and_completions_keep_their_order(server: RunningServer) -> None:
    with server.client() as client:
        answer = client.completions.create(
            model=BASE, prompt=["ab", "cd"], n=2, best_of=2, max_tokens=2, temperature=0, echo=True
        )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text[:2] for choice in answer.choices] == ["ab", "ab", "cd", "cd"]


@pytest.mark.parametrize("prompt", ["hello", ["hello"], [104, 105], [[104, 105], [106]]])
def test_every_form_of_prompt_is_answered(server: RunningServer, prompt: Any) -> None:
    prompt = _within(server, prompt)
    with server.client() as client:
        answer = client.completions.create(model=BASE, prompt=prompt, temperature=0, max_tokens=3)
    several = isinstance(prompt[0], list)
    assert len(answer.choices) == (len(prompt) if several else 1)
    assert answer.object == "text_completion"


def _within(server: RunningServer, prompt: Any) -> Any:
    """The prompt with token ids that the engine's vocabulary has."""
    size = server.engine.model_info.vocab_size
    if isinstance(prompt, int):
        return prompt % size
    return [_within(server, item) for item in prompt] if isinstance(prompt, list) else prompt


def test_streamed_completion_ends_with_a_reason(server: RunningServer) -> None:
    with server.client() as client:
        chunks = list(
            client.completions.create(
                model="upper",
                prompt=["ab", "cd"],
                temperature=0,
                max_tokens=5,
                stream=True,
                echo=True,
            )
        )
    texts = {0: "", 1: ""}
    for chunk in chunks:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert (texts[0][:2], texts[1][:2]) == ("ab", "cd")
    reasons = [c.choices[0].index for c in chunks if c.choices[0].finish_reason]
    assert sorted(reasons) == [0, 1]


def test_chat_logprobs(server: RunningServer) -> None:
    with server.client() as client:
        answer = client.chat.completions.create(
            model=BASE,
            messages=MESSAGES,
            temperature=0,
            logprobs=True,
            top_logprobs=4,
            max_tokens=3,
        )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 3
    for entry in logprobs.content:
        assert len(entry.top_logprobs) == 4
        assert entry.top_logprobs[0].token == entry.token  # greedy: the likeliest
        assert entry.logprob == entry.top_logprobs[0].logprob <= 0
        assert entry.bytes == list(entry.token.encode())


def test_completion_logprobs_with_echo_cover_the_prompt(server: RunningServer) -> None:
    with server.client() as client:
        answer = client.completions.create(
            model=BASE, prompt="abcd", temperature=0, logprobs=2, max_tokens=2, echo=True
        )
    assert answer.usage is not None
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.token_logprobs is not None
    assert logprobs.top_logprobs is not None
    assert len(logprobs.tokens) == answer.usage.total_tokens
    assert logprobs.token_logprobs[0] is None
    assert logprobs.top_logprobs[0] is None
    assert all(value <= 0 for value in logprobs.token_logprobs[1:])
    assert logprobs.text_offset is not None
    assert logprobs.text_offset[0] == 0


def test_echo_of_the_prompt_alone(server: RunningServer) -> None:
    with server.client() as client:
        answer = client.completions.create(
            model=BASE, prompt="abcd", temperature=0, logprobs=1, max_tokens=0, echo=True
        )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 0
    choice = answer.choices[0]
    assert choice.text == "abcd"
    assert choice.logprobs is not None
    assert len(choice.logprobs.tokens or []) == answer.usage.prompt_tokens


@pytest.mark.parametrize("stop", [None, ["a"]])  # the token that nobody asked for is an "a"
@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_alone_ends_by_its_length(
    server: RunningServer, stop: list[str] | None, stream: bool
) -> None:
    body = {"model": BASE, "prompt": "abcd", "max_tokens": 0, "echo": True, "temperature": 0}
    text = server.post("/v1/completions", json=body | {"stop": stop, "stream": stream}).text
    parts = [line.removeprefix("data: ") for line in text.splitlines() if line]
    choices = [choice for part in parts if part[0] == "{" for choice in json.loads(part)["choices"]]
    reasons = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    assert (reasons, choices[-1]["stop_reason"]) == (["length"], None)


def test_models_name_parent_and_root(server: RunningServer) -> None:
    with server.client() as client:
        entries = {entry.id: entry for entry in client.models.list()}
        one = client.models.retrieve("upper")
    assert list(entries) == [BASE, *sorted(NAMES)]
    assert one == entries["upper"]
    base, adapter = entries[BASE].model_dump(), entries["upper"].model_dump()
    assert (base["parent"], adapter["parent"]) == (None, BASE)
    assert adapter["root"] == next(i.path for i in server.engine.adapters() if i.name == "upper")


@pytest.mark.parametrize("path", ["chat", "completions", "retrieve"])
def test_an_unknown_model_is_404_and_names_the_known(server: RunningServer, path: str) -> None:
    with server.client() as client:
        calls: dict[str, Any] = {
            "chat": lambda: client.chat.completions.create(model="nobody", messages=MESSAGES),
            "completions": lambda: client.completions.create(
                model="nobody", prompt=["a", "b"], stream=True
            ),
            "retrieve": lambda: client.models.retrieve("nobody"),
        }
        with pytest.raises(openai.NotFoundError) as caught:
            calls[path]()
    assert caught.value.code == "model_not_found"
    assert all(name in caught.value.message for name in [BASE, *NAMES])


def test_64_streams_at_once(server: RunningServer) -> None:
    words = ["".join(chr(97 + (i * 7 + k) % 26) for k in range(6)) for i in range(64)]
    models = [[BASE, *NAMES][i % 5] for i in range(64)]

    async def one(client: openai.AsyncOpenAI, model: str, word: str) -> str:
        stream = await client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": word}],
            temperature=0,
            stream=True,
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def every() -> list[str]:
        async with server.async_client() as client:
            return await asyncio.gather(
                *(one(client, *pair) for pair in zip(models, words, strict=True))
            )

    right = [right_answer(*pair) for pair in zip(models, words, strict=True)]
    assert asyncio.run(every()) == right
