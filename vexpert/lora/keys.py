"""Keys of adapter files: one key -> the module it is about and which part of it the tensor is."""

import functools
from typing import NamedTuple

import torch

from vexpert.config import printable

# Wrappers that trainers leave in module paths; they name no module of the model.
WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
PREFIX = "base_model.model."  # of PEFT's keys
_PREFIXES = (PREFIX, "base_model.")

_LORA_PARTS = {
    "A.weight": "A",
    "A": "A",
    "B.weight": "B",
    "B": "B",
    "B.bias": "B.bias",
    "embedding_A": "embedding_A",
    "embedding_B": "embedding_B",
    "magnitude_vector": "magnitude",
    "magnitude_vector.weight": "magnitude",
}
_TOKENS = ".token_adapter.trainable_tokens_delta"
_HOLDERS = ("modules_to_save", "original_module", "base_layer")


class Piece(NamedTuple):
    """One tensor of the file. `part`: A, B, B.bias, embedding_A, embedding_B, magnitude, tokens,
    or "param" for a full parameter, named `param`, kept by `holder`.
    """

    key: str  # for messages: what a terminal would act upon is escaped
    module: str  # as the file names it, without PEFT's prefix
    part: str
    tensor: torch.Tensor  # [...]: shape and dtype are the file's
    holder: str = ""  # modules_to_save, original_module, base_layer, or ""
    param: str = ""  # weight, bias, ...
    adapter: str = ""  # PEFT's adapter name, where the key still holds it


# One experts module's pieces: (projection, part) -> expert -> piece; expert None: all together.
Slots = dict[tuple[str, str], dict[int | None, Piece]]


class _Name(NamedTuple):
    """A Piece without its tensor."""

    module: str
    part: str
    holder: str = ""
    param: str = ""
    adapter: str = ""


def parse_key(key: str, tensor: torch.Tensor) -> Piece | None:
    """The piece that `key` names; None when it is no key of a LoRA adapter."""
    found = _parse(key)
    if found is None:
        return None
    module, part, holder, param, adapter = found
    return Piece(printable(key), module, part, tensor, holder, param, adapter)


@functools.lru_cache(maxsize=1 << 16)  # a model's adapters have thousands of keys in common
def _parse(key: str) -> _Name | None:
    name = key
    if "_wrapped_module." in key or "_orig_mod." in key:
        for wrapper in WRAPPERS:
            name = name.replace(wrapper, "")
    for prefix in _PREFIXES:
        if name.startswith(prefix):
            name = name[len(prefix) :]
            break
    module, found, tail = name.rpartition(".lora_")
    if found:
        return _lora_name(module, tail)
    if _TOKENS in name:
        module, _, adapter = name.partition(_TOKENS)
        return _Name(module, "tokens", adapter=adapter.removeprefix("."))
    return _param_name(name)


def _lora_name(module: str, tail: str) -> _Name | None:
    part = _LORA_PARTS.get(tail)
    if part is not None:
        return _Name(module, part)
    words = tail.split(".")
    if len(words) < 2:
        return None
    part = _LORA_PARTS.get(".".join((words[0], *words[2:])))
    return None if part is None else _Name(module, part, adapter=words[1])


def _param_name(name: str) -> _Name | None:
    module, _, param = name.rpartition(".")
    words = module.split(".")
    adapter = ""
    if len(words) > 2 and words[-2] == "modules_to_save":
        adapter = words.pop()
    holder = words.pop() if words[-1] in _HOLDERS else ""
    while holder == "base_layer" and words and words[-1] in ("base_layer", "token_adapter"):
        words.pop()
    if not words or not param:
        return None
    return _Name(".".join(words), "param", holder, param, adapter)
