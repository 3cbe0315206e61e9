"""What is said of a path or method that is not served: what to use instead."""

WRITES_TEXT = "the models served here write text: use /v1/chat/completions"
STORES_NOTHING = "nothing is stored here: send the whole conversation with each request"
RETRIEVED = "use /v1/chat/completions, with what was retrieved in a message"
REMEDIES = {
    "assistants": STORES_NOTHING,
    "audio": WRITES_TEXT,
    "batches": "send the requests one by one: those that run together share a batch",
    "chat": STORES_NOTHING,
    "classify": WRITES_TEXT,
    "conversations": STORES_NOTHING,
    "embeddings": WRITES_TEXT,
    "files": RETRIEVED,
    "fine_tuning": "train elsewhere, then load the adapter with POST /v1/load_lora_adapter",
    "generate": "use /v1/completions; `model` is the adapter's name",
    "images": WRITES_TEXT,
    "moderations": WRITES_TEXT,
    "pooling": WRITES_TEXT,
    "realtime": WRITES_TEXT,
    "rerank": WRITES_TEXT,
    "responses": "use /v1/chat/completions, the openai client's chat.completions.create",
    "score": WRITES_TEXT,
    "threads": STORES_NOTHING,
    "uploads": RETRIEVED,
    "vector_stores": RETRIEVED,
    "videos": WRITES_TEXT,
}
ELSE = "/openapi.json lists what is"
BELOW_V1 = {
    "adapters", "chat", "completions", "load_lora_adapter", "models", "unload_lora_adapter",
}  # fmt: skip


def no_such_route(method: str, path: str) -> str:
    """The message for a path that no route has."""
    return f"{method} {path} is not served: {_remedy(path)}"


def no_such_method(method: str, path: str, allowed: str) -> str:
    """The message for a path whose routes take other methods, those `allowed`."""
    return f"{method} {path} is not served: the route takes {allowed}"


def _remedy(path: str) -> str:
    parts = path.strip("/").split("/")
    if parts[0] in BELOW_V1:
        return f"use /v1{path}; a client's base_url ends with /v1"
    if parts[:2] == ["v1", "v1"]:
        return f"use {path.removeprefix('/v1')}; a client's base_url ends with one /v1"
    family = parts[1] if parts[0] == "v1" and len(parts) > 1 else parts[0]
    return REMEDIES.get(family, ELSE)
