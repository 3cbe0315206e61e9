"""The bundled demo model's files: size, tokenizer, chat template, and how the adapters differ."""

import json
import re
import string
from importlib import import_module
from pathlib import Path

import pytest
from safetensors.numpy import load_file
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from vexpert.demo import adapter_paths, model_path

MAX_BYTES = 12_000_000
ADAPTERS = ["reverse", "shift", "sort", "upper"]


def read_json(path: Path) -> dict[str, object]:
    return json.loads(path.read_text())


def tensor_shapes(path: Path) -> dict[str, list[int]]:
    return {name: list(tensor.shape) for name, tensor in load_file(path).items()}


def adapter_shapes(name: str) -> dict[str, list[int]]:
    return tensor_shapes(adapter_paths()[name] / "adapter_model.safetensors")


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(model_path())


def test_total_size() -> None:
    files = [path for path in model_path().parent.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= MAX_BYTES


def test_all_adapters_are_found() -> None:
    assert sorted(adapter_paths()) == ADAPTERS


def test_config() -> None:
    config = AutoConfig.from_pretrained(model_path())
    assert config.model_type == "qwen3_moe"
    assert config.num_hidden_layers >= 4
    assert config.num_experts >= 16
    assert config.num_experts_per_tok >= 2
    assert config.max_position_embeddings >= 256


def test_special_tokens_agree(tokenizer: PreTrainedTokenizerBase) -> None:
    config = AutoConfig.from_pretrained(model_path())
    generation = GenerationConfig.from_pretrained(model_path())
    assert config.vocab_size == len(tokenizer)
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        values = {getattr(config, name), getattr(generation, name), getattr(tokenizer, name)}
        assert len(values) == 1, name
        assert None not in values, name
    assert tokenizer.pad_token_id != tokenizer.eos_token_id


@pytest.mark.parametrize(
    "text",
    [
        "Hello, wOrld  two spaces",
        " leading and trailing ",
        '{"a": [1, 2.5, null]}\n\t"b" .',
        string.digits + string.ascii_letters + string.punctuation + " ",
        "",
    ],
)
def test_tokenizer_round_trip(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    ids = tokenizer.encode(text)
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text


def test_unknown_characters(tokenizer: PreTrainedTokenizerBase) -> None:
    assert tokenizer.encode("é") == [tokenizer.unk_token_id]
    assert tokenizer.decode(tokenizer.encode("aéb")) == "a<unk>b"


def test_chat_template(tokenizer: PreTrainedTokenizerBase) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "one"},
        {"role": "user", "content": [{"type": "text", "text": "two"}]},
    ]
    history = (
        "<bos><|system|>Be brief.<|end|><|user|>one<|end|><|assistant|>one<|end|><|user|>two<|end|>"
    )
    assert tokenizer.apply_chat_template(messages, tokenize=False) == history
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert prompt == history + "<|assistant|>"
    ids = tokenizer(prompt)["input_ids"]
    assert tokenizer.decode(ids) == prompt
    assert ids[0] == tokenizer.bos_token_id
    assert ids.count(tokenizer.eos_token_id) == 4


def test_the_template_shows_tools_and_calls(tokenizer: PreTrainedTokenizerBase) -> None:
    parameters = {"type": "object", "properties": {"city": {"type": "string"}, "day": {}}}
    described = {"name": "weather", "description": "of a city", "parameters": parameters}
    tools = [{"type": "function", "function": f} for f in (described, {"name": "now"})]
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "rain"},
    ]
    text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
    assert text == (
        "<bos><|system|>Tools:\nweather(city, day) of a city\nnow()<|end|><|user|>hi<|end|>"
        '<|assistant|><tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
        "<|end|><|system|>rain<|end|>"
    )


def test_the_template_is_the_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    scripts = Path(__file__).parent.parent / "scripts"
    monkeypatch.syspath_prepend(str(scripts))
    module = import_module("demo.tokenizer")
    assert (model_path() / "chat_template.jinja").read_text() == module.CHAT_TEMPLATE


def test_sizes_are_those_of_the_page() -> None:
    page = (Path(__file__).parent.parent / "docs" / "demo.md").read_text()
    files = [path for path in model_path().iterdir() if path.name != "model.safetensors"]
    sizes = [sum(path.stat().st_size for path in files)]
    for folder in adapter_paths().values():
        sizes.append(sum(path.stat().st_size for path in folder.iterdir()))
    sizes.append((model_path() / "model.safetensors").stat().st_size)
    for size in (*sizes, sum(sizes)):
        assert f"| {size:,} |" in page


def test_adapters_differ_in_rank_and_targets() -> None:
    configs = [read_json(path / "adapter_config.json") for path in adapter_paths().values()]
    assert all(config["peft_type"] == "LORA" for config in configs)
    assert len({config["r"] for config in configs}) == len(configs)
    targets = {
        (tuple(config["target_modules"]), tuple(config["target_parameters"])) for config in configs
    }
    assert len(targets) >= 3


def test_one_adapter_is_experts_only() -> None:
    def experts_only(name: str) -> bool:
        return all(".mlp.experts." in key for key in adapter_shapes(name))

    assert [name for name in ADAPTERS if experts_only(name)] == ["upper"]
    for name in ADAPTERS:
        assert any(".mlp.experts." in key for key in adapter_shapes(name)), name


def test_a_rank_pattern_is_in_the_weights() -> None:
    config = read_json(adapter_paths()["sort"] / "adapter_config.json")
    shapes = adapter_shapes("sort")
    rank = next(shape[0] for key, shape in shapes.items() if key.endswith("q_proj.lora_A.weight"))
    assert rank == config["rank_pattern"]["q_proj"] != config["r"]


def test_no_machine_paths() -> None:
    for path in model_path().parent.rglob("*.json"):
        assert not re.search(r'"(/|[A-Za-z]:\\\\)\w', path.read_text()), path
    for folder in adapter_paths().values():
        assert (
            read_json(folder / "adapter_config.json")["base_model_name_or_path"] == "vexpert-demo"
        )
