"""Malformed request bodies: a right one with random damage to its values, keys or bytes."""

import copy
import json
import random
from typing import Any

from helpers_server import BASE

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "string"}}}
BODIES: list[tuple[str, dict[str, Any]]] = [
    (
        "/v1/chat/completions",
        {
            "model": BASE,
            "messages": [
                {"role": "user", "content": "hello"},
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "content": [{"type": "text", "text": "x"}], "tool_call_id": "1"},
                {"role": "user", "content": "hello"},
            ],
            "max_tokens": 3,
            "tools": [TOOL],
            "tool_choice": {"type": "function", "function": {"name": "f"}},
            "stream": True,
            "stream_options": {"include_usage": True},
            "logprobs": True,
            "top_logprobs": 2,
            "stop": ["a", "b"],
            "logit_bias": {"5": 1.0},
        },
    ),
    (
        "/v1/chat/completions",
        {
            "model": "upper",
            "messages": [{"role": "user", "content": "hello"}],
            "response_format": FORMAT,
            "chat_template_kwargs": {"note": "x"},
            "max_completion_tokens": 3,
        },
    ),
    (
        "/v1/completions",
        {
            "model": BASE,
            "prompt": ["a", "b"],
            "max_tokens": 3,
            "n": 2,
            "echo": True,
            "logprobs": 2,
            "seed": 3,
            "temperature": 0.5,
            "top_p": 0.5,
            "top_k": 3,
            "stop_token_ids": [5],
            "structured_outputs": {"regex": "a+"},
        },
    ),
    (
        "/v1/completions",
        {"model": BASE, "prompt": [[3, 4], [5]], "guided_json": FORMAT, "max_tokens": 2},
    ),
    ("/tokenize", {"model": BASE, "prompt": "x", "return_token_strs": True}),
    ("/tokenize", {"messages": [{"role": "user", "content": "x"}], "tools": [TOOL]}),
    ("/detokenize", {"tokens": [3, 4]}),
    ("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "/nothing/here"}),
    ("/v1/unload_lora_adapter", {"lora_name": "nobody"}),
]
VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2**31, 2**63, 10**40, 1e308, -0.0, 0.5, "", "x", "\ud800", "\x00",
    "é" * 50, "null", "9" * 400, [], [[]], {}, {"": None}, [None], [0.5], {"type": "text"},
    {"a": {"b": {"c": []}}}, ["x"] * 70, "(" * 300, "[" * 300, {"$ref": "#"}, {"anyOf": [{}]},
    {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "{{ 1/0 }}",
]  # fmt: skip
KEYS = ["model", "messages", "", "x", "type", "role", "stream", "\ud800", "json", "n", "schema"]


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) in a document."""
    found = []
    pending = [value]
    while pending:
        part = pending.pop()
        keys = list(part) if isinstance(part, dict) else range(len(part))
        for key in keys:
            found.append((part, key))
            if isinstance(part[key], dict | list):
                pending.append(part[key])
    return found


def damage(body: dict[str, Any], rng: random.Random) -> None:
    """One change of a value or a key, in place."""
    container, key = rng.choice(places(body) or [(body, "model")])
    kind = rng.randrange(5)
    if kind <= 1:
        container[key] = copy.deepcopy(rng.choice(VALUES))
    elif kind == 2 and isinstance(container, dict):
        container.pop(key, None)
    elif kind == 3 and isinstance(container, dict):
        container[rng.choice(KEYS)] = copy.deepcopy(rng.choice(VALUES))
    elif isinstance(container, list):
        container.insert(0, copy.deepcopy(rng.choice(VALUES)))
    elif container is body:
        container[key] = [container.get(key)]


def malformed(rng: random.Random) -> tuple[str, bytes]:
    """(path, body); a few are still right."""
    path, body = rng.choice(BODIES)
    body = copy.deepcopy(body)
    for _ in range(rng.randrange(1, 4)):
        damage(body, rng)
    content = bytearray(
        json.dumps(body, ensure_ascii=rng.random() < 0.9).encode("utf-8", "replace")
    )
    if rng.random() < 0.25 and content:
        for _ in range(rng.randrange(1, 4)):
            at = rng.randrange(len(content))
            kind = rng.randrange(3)
            if kind == 0:
                content[at] = rng.randrange(256)
            elif kind == 1:
                del content[at : at + rng.randrange(1, 30)]
            else:
                content[at:at] = rng.choice([b"{", b"[", b'"', b"\x00", b"\xff", b"1e999", b"NaN"])
            if not content:
                break
    return path, bytes(content)
