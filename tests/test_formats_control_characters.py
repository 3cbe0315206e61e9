"""Names of tensors in messages: no newline, escape or half a letter reaches a log or a terminal."""

import pytest
import torch
from helpers_writers import linear_keys, per_expert_keys, random_adapter, save, tiny_map

from vexpert.config import printable
from vexpert.errors import AdapterError
from vexpert.lora.extras import EXTRAS
from vexpert.lora.files import check_tensors
from vexpert.lora.halves import check_half_keys
from vexpert.lora.key_lists import grouped, key_lines
from vexpert.lora.memory_source import AdapterTensors
from vexpert.lora.reader import read_adapter
from vexpert.lora.report import file_rows

ODD = "\n\x1b[31m\u202e\r\x7f"
SAFE = r"\n\x1b[31m\u202e\r\x7f"
TARGETS = tiny_map("qwen3_moe")
WANTED = random_adapter(TARGETS, 2, 4.0, torch.Generator().manual_seed(0))
KEYS = {**linear_keys(WANTED, TARGETS), **per_expert_keys(WANTED, TARGETS)}
Q = "base_model.model.model.layers.0.self_attn.q_proj"
ONE = "base_model.model.model.layers.0.mlp.experts.1.up_proj"


def is_safe(text: str) -> bool:
    return text.replace("\n", "").isprintable() and SAFE in text and ODD not in text


def test_printable():
    assert printable(f"a.{ODD}.b") == f"a.{SAFE}.b"
    assert printable(r"it's é \n ٠") == r"it's é \n ٠"
    assert printable("\udcff\0") == r"\udcff\x00"


def renamed(old: str, new: str) -> dict[str, torch.Tensor]:
    return {key.replace(old, new): x for key, x in KEYS.items()}


NAMED = {key.replace("_A.weight", f"_A.x{ODD}.weight"): x for key, x in KEYS.items()}
NAMED = {key.replace("_B.weight", f"_B.x{ODD}.weight"): x for key, x in NAMED.items()}
A = f"lora_A.x{ODD}.weight"


@pytest.mark.parametrize(
    "keys",
    [
        renamed("q_proj", f"q{ODD}_proj"),  # no place
        {k: x for k, x in NAMED.items() if "q_proj.lora_A" not in k},  # half a pair
        {**NAMED, f"{Q}.{A}": torch.ones(3, 16)},
        {**NAMED, f"{ONE}.{A}": torch.ones(3, 16)},
        {**NAMED, f"{ONE}.{A}": torch.ones(2, 17)},
        {**NAMED, f"{Q}.lora_A.weight": torch.ones(2, 16)},  # twice
        {**NAMED, f"{Q}.lora_B.y{ODD}.bias": torch.ones(16)},  # two adapters
        {**KEYS, f"{ODD}": torch.zeros(3, 0)},
        {**KEYS, f"{ODD}": torch.zeros(())},
        {**KEYS, f"{ODD}": torch.zeros(3, dtype=torch.int8)},
        {
            **KEYS,
            f"base_model.model.lm_head.modules_to_save.x{ODD}.weight": torch.full(
                (40, 16), torch.nan
            ),
        },
    ],
)
def test_no_error_has_them(tmp_path, keys):
    with pytest.raises(AdapterError) as error:
        read_adapter(save(tmp_path, keys, r=2, lora_alpha=8), TARGETS, supported=frozenset(EXTRAS))
    assert is_safe(str(error.value))


def test_lists_and_tables():
    keys = [f"a.{ODD}.{i}.lora_A.weight" for i in range(3)]
    assert grouped(keys)[0].text == f"a.{SAFE}.{{0-2}}.lora_A.weight"
    assert is_safe(key_lines(keys))
    with pytest.raises(AdapterError) as error:
        check_half_keys(keys)
    assert is_safe(str(error.value))
    names = [*keys, f"b.{ODD}", f"b.{ODD}.c.0.lora_A.weight", f"b.c.{ODD}"]
    (first, *_) = rows = file_rows({name: torch.ones(2) for name in names})
    assert first.count == 3
    assert all(is_safe(row.module + row.part) for row in rows)
    rows = file_rows({f"a.{ODD}.{i}.b.{j}.w": torch.ones(2) for i, j in ((0, 0), (1, 1))})
    assert rows[0].module == f"a.{SAFE}.N.b.N"


def test_tensors_from_memory():
    source = AdapterTensors({"peft_type": "LORA", "r": 2}, {f"{ODD}": torch.ones(2, 2)})
    with pytest.raises(AdapterError) as error:
        read_adapter(source, TARGETS)
    assert is_safe(str(error.value))
    with pytest.raises(AdapterError) as error:
        check_tensors("x", {f"{ODD}": torch.ones(2, 0)})
    assert is_safe(str(error.value))
