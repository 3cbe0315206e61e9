"""Mutations of adapter folders: keys, shapes, values, JSON, bytes, files."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
INDEX = "adapter_model.safetensors.index.json"
VALUES: list[Any] = [
    None, True, False, 0, -1, 3, 10**30, 1.5, float("nan"), float("inf"), "", "x", "0.19.0",
    "pissa", "all", "grouped_by_expert", [], [0], ["q_proj"], [[1]], {}, {"q_proj": 2},
    {".*": 0}, {"(": 1}, {"embed_tokens": [1, 2]},
]  # fmt: skip
WORDS = ["lora_A", "lora_B", "layers", "0", "1", "99", "-1", "experts", "base_layer", "mlp", "w1",
    "gate_proj", "gate_up_proj", "down_projs", "weight", "bias", "default", "lora_magnitude_vector",
    "lora_embedding_A", "modules_to_save", "original_module", "token_adapter", "", "²",
    "lm_head"]  # fmt: skip


def mutate(folder: Path, rng: random.Random) -> None:
    """One to three random changes of the folder, in place."""
    for _ in range(rng.randint(1, 3)):
        rng.choice(MUTATIONS)(folder, rng)


Tensors = dict[str, torch.Tensor]


def _tensors(
    folder: Path, rng: random.Random, change: Callable[[Tensors, random.Random], None]
) -> None:
    try:
        tensors = load_file(folder / WEIGHTS)
    except Exception:  # noqa: BLE001 - a mutation before may have broken the file in any way
        return
    if tensors:
        change(tensors, rng)
        save_file({k: x.contiguous().clone() for k, x in tensors.items()}, folder / WEIGHTS)


def _key(folder: Path, rng: random.Random) -> None:
    def change(tensors: Tensors, rng: random.Random) -> None:
        key = rng.choice(sorted(tensors))
        words = key.split(".")
        at = rng.randrange(len(words))
        kind = rng.randrange(3)
        if kind == 0:
            words[at] = rng.choice(WORDS)
        elif kind == 1:
            words.insert(at, rng.choice(WORDS))
        else:
            del words[at]
        tensors[".".join(words)] = tensors.pop(key)

    _tensors(folder, rng, change)


def _drop(folder: Path, rng: random.Random) -> None:
    def change(tensors: Tensors, rng: random.Random) -> None:
        for key in rng.sample(sorted(tensors), min(len(tensors), rng.choice([1, 1, 2, 10, 1000]))):
            del tensors[key]

    _tensors(folder, rng, change)


def _copy(folder: Path, rng: random.Random) -> None:
    def change(tensors: Tensors, rng: random.Random) -> None:
        key = rng.choice(sorted(tensors))
        old, new = rng.sample(WORDS, 2)
        tensors[key.replace(old, new)] = tensors[key]

    _tensors(folder, rng, change)


def _shape(folder: Path, rng: random.Random) -> None:
    def change(tensors: Tensors, rng: random.Random) -> None:
        key = rng.choice(sorted(tensors))
        x = tensors[key]
        kind = rng.randrange(7)
        if kind == 0:
            x = x.mT if x.ndim > 1 else x[None]
        elif kind == 1:
            x = x[:0]
        elif kind == 2:
            x = x[..., :-1]
        elif kind == 3:
            x = x.flatten()
        elif kind == 4:
            x = x[None]
        elif kind == 5:
            x = torch.cat([x, x])
        else:
            x = torch.tensor(1.0)
        tensors[key] = x

    _tensors(folder, rng, change)


def _value(folder: Path, rng: random.Random) -> None:
    def change(tensors: Tensors, rng: random.Random) -> None:
        key = rng.choice(sorted(tensors))
        x = tensors[key].clone()
        if rng.random() < 0.5:
            tensors[key] = x.to(rng.choice([torch.int8, torch.float64, torch.float16, torch.bool]))
        elif x.numel() and x.is_floating_point():
            x.view(-1)[rng.randrange(x.numel())] = rng.choice([float("nan"), float("inf"), 0.0])
            tensors[key] = x

    _tensors(folder, rng, change)


def _config(folder: Path, rng: random.Random) -> None:
    try:
        raw = json.loads((folder / CONFIG).read_text())
        names = sorted(raw)
    except (OSError, ValueError, TypeError):
        return
    extra = ["rank_pattern", "alpha_pattern", "use_dora", "lora_bias", "modules_to_save",
        "trainable_token_indices", "target_parameters", "peft_version", "bias", "auto_mapping",
        "init_lora_weights", "lora_B_layout", "use_rslora", "ensure_weight_tying"]  # fmt: skip
    name = rng.choice([*names, *extra])
    if rng.random() < 0.2:
        raw.pop(name, None)
    else:
        raw[name] = rng.choice(VALUES)
    (folder / CONFIG).write_text(json.dumps(raw))


def _bytes(folder: Path, rng: random.Random) -> None:
    path = folder / rng.choice([WEIGHTS, CONFIG])
    if not path.is_file():
        return
    data = bytearray(path.read_bytes())
    if rng.random() < 0.5:
        del data[rng.randrange(len(data) + 1) :]
    for _ in range(rng.randint(0, 4) if data else 0):
        data[rng.randrange(min(len(data), 400))] = rng.randrange(256)
    path.write_bytes(bytes(data))


def _files(folder: Path, rng: random.Random) -> None:
    path = folder / rng.choice([WEIGHTS, CONFIG])
    kind = rng.randrange(6)
    if kind == 0 or not path.is_file():
        path.unlink(missing_ok=True)
    elif kind == 1:
        path.unlink()
        path.symlink_to(rng.choice(["../nothing", path.name, "/dev/null", "."]))
    elif kind == 2:
        moved = folder / "moved"
        path.replace(moved)
        path.symlink_to("moved")
    elif kind == 3:
        path.replace(folder / rng.choice(["adapter_model.bin", "other", INDEX]))
    elif kind == 4:
        path.write_text(rng.choice(["", "../x", "{}", "null"]))
    else:
        name = rng.choice(["../x", WEIGHTS, "", "a/b", 3])
        (folder / INDEX).write_text(json.dumps({"weight_map": {"k": name}}))
        (folder / WEIGHTS).replace(folder / "moved")


MUTATIONS = [_key, _key, _drop, _copy, _shape, _shape, _value, _config, _config, _bytes, _files]
