"""What /openapi.json and /docs say beyond what FastAPI derives: answers, streams and errors."""

from typing import Any

from fastapi import FastAPI

Json = dict[str, Any]
STRING: Json = {"type": "string"}
TEXT: Json = {"type": ["string", "null"]}
INTEGER: Json = {"type": "integer"}
ERROR: Json = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {"message": STRING, "type": STRING, "param": TEXT, "code": TEXT},
        }
    },
}
ERRORS = {
    "400": "A field, named in `param`, or the body is malformed, unknown or not served",
    "401": "No valid API key",
    "403": "The API key is not for this model or action, or the folder not allowed",
    "404": "Nobody serves this model or adapter",
    "408": "The body did not arrive in time",
    "413": "The body is too large, or holds too many values",
    "415": "The body has a Content-Encoding",
    "431": "The path and headers are too large",
    "429": "The queue is full; `Retry-After` says when to try again",
    "500": "An error of the server's own",
    "503": "The server is shutting down, or its engine has failed",
    "504": "The answer took longer than the server allows",
}
USAGE: Json = {
    "type": ["object", "null"],
    "required": ["prompt_tokens", "completion_tokens", "total_tokens"],
    "properties": {
        "prompt_tokens": INTEGER,
        "completion_tokens": INTEGER,
        "total_tokens": INTEGER,
        "prompt_tokens_details": {"type": "object", "properties": {"cached_tokens": INTEGER}},
    },
}
TOOL_CALL: Json = {
    "type": "object",
    "required": ["id", "type", "function"],
    "properties": {
        "id": STRING,
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "required": ["name", "arguments"],
            "properties": {"name": STRING, "arguments": STRING},
        },
    },
}
ENDING: Json = {"index": INTEGER, "logprobs": {"type": ["object", "null"]}, "finish_reason": TEXT}
MESSAGE: Json = {
    "type": "object",
    "required": ["role", "content"],
    "properties": {
        "role": {"const": "assistant"},
        "content": TEXT,
        "refusal": {"type": "null"},
        "tool_calls": {"type": "array", "items": TOOL_CALL},
    },
}


def _completion(kind: str, choice: Json) -> Json:
    properties = {
        "id": STRING,
        "object": {"const": kind},
        "created": INTEGER,
        "model": STRING,
        "system_fingerprint": STRING,
        "choices": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["index", "finish_reason", *choice],
                "properties": ENDING | choice,
            },
        },
        "usage": USAGE,
    }
    required = ["id", "object", "created", "model", "choices"]
    return {"type": "object", "required": required, "properties": properties}


ANSWERS = {
    "/v1/chat/completions": _completion("chat.completion", {"message": MESSAGE}),
    "/v1/completions": _completion("text_completion", {"text": STRING}),
}
STREAM = (
    "With `stream`: events `data: CHUNK`, CHUNK as OpenAI's; comments `: keep-alive` while nothing "
    "comes; an error object instead of a chunk if the answer cannot go on; last `data: [DONE]`, "
    "but after an error of status 500"
)


WITHOUT_BODY = ("/health", "/ready", "/ping")
PLAIN_TEXT = ("/metrics", "/v1/load_lora_adapter", "/v1/unload_lora_adapter")


class DescribedApp(FastAPI):
    """An app whose description knows this server's answers."""

    def openapi(self) -> Json:
        """The document, made at the first call."""
        if self.openapi_schema is None:
            document = super().openapi()
            components = document.setdefault("components", {}).setdefault("schemas", {})
            components["Error"] = ERROR
            for name in ("HTTPValidationError", "ValidationError"):
                components.pop(name, None)
            for path, operations in document["paths"].items():
                for method, operation in operations.items():
                    _describe(path, method, operation["responses"])
        assert self.openapi_schema is not None
        return self.openapi_schema


def _describe(path: str, method: str, responses: Json) -> None:
    responses.pop("422", None)
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    wanted = list(ERRORS) if method == "post" else ["401", "404", "431", "500", "503"]
    for status in wanted:
        responses[status] = {"description": ERRORS[status], "content": error}
    if path in WITHOUT_BODY:
        responses["200"] = {"description": "Yes"}
    if path in PLAIN_TEXT:
        text = {"text/plain": {"schema": STRING}}
        responses["200"] = {"description": "In words", "content": text}
    if path in ANSWERS:
        content: Json = {"application/json": {"schema": ANSWERS[path]}}
        content["text/event-stream"] = {"schema": STRING}
        responses["200"] = {"description": f"The answer. {STREAM}", "content": content}
