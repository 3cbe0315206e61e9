"""An adapter whose weights overflow ends its own requests and leaves nothing to the next."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import vexpert.demo
from vexpert import LLM, SamplingParams
from vexpert.errors import RequestError


def test_later_requests_in_the_same_blocks_are_right(tmp_path: Path) -> None:
    source = vexpert.demo.adapter_paths()["reverse"]
    shutil.copytree(source, tmp_path / "huge")
    file = tmp_path / "huge" / "adapter_model.safetensors"
    huge = {name: torch.full_like(tensor, 1e30) for name, tensor in load_file(file).items()}
    save_file(huge, file)
    assert json.loads((tmp_path / "huge" / "adapter_config.json").read_text())["r"]
    llm = LLM(dtype="float32", device="cpu", max_num_seqs=4, kv_cache_memory=1 << 20)
    llm.load_adapter("huge", str(tmp_path / "huge"))
    params = SamplingParams(temperature=0, max_tokens=12)
    for word in ("hello", "strange", "cat", "encyclopedia"):
        chat = [{"role": "user", "content": word}]
        with pytest.raises(RequestError, match="huge"):
            llm.chat(chat, params, adapter="huge")
        for _ in range(3):
            assert [out.outputs[0].text for out in llm.chat([chat] * 3, params)] == [word] * 3
