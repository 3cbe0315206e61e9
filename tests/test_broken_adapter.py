"""An adapter whose weights overflow ends its own requests and leaves nothing to the next."""

import json

import pytest
import torch
from safetensors.torch import load_file

import vexpert.demo
from vexpert import LLM, SamplingParams
from vexpert.errors import RequestError


def test_later_requests_in_the_same_blocks_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    source = vexpert.demo.adapter_paths()["reverse"]
    config = json.loads((source / "adapter_config.json").read_text())
    tensors = load_file(source / "adapter_model.safetensors")
    huge = {name: torch.full_like(tensor, 1e30) for name, tensor in tensors.items()}
    llm = LLM(dtype="float32", device="cpu", max_num_seqs=4, kv_cache_memory=1 << 20)
    monkeypatch.setattr("vexpert.lora.formats.context.LARGEST_CHANGE", float("inf"))
    llm.load_adapter("huge", tensors=huge, config=config)
    params = SamplingParams(temperature=0, max_tokens=12)
    for word in ("hello", "strange", "cat", "encyclopedia"):
        chat = [{"role": "user", "content": word}]
        with pytest.raises(RequestError, match="huge"):
            llm.chat(chat, params, adapter="huge")
        for _ in range(3):
            assert [out.outputs[0].text for out in llm.chat([chat] * 3, params)] == [word] * 3
