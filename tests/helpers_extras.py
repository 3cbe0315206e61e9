"""Adapters with every extra, written as files, and engines over tiny models to run them."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from helpers_cases import ONE_TOKEN, log_prob_table
from helpers_engine import FakeTokenizer
from helpers_formats import applied, log_probs, target_map
from helpers_models import tiny_model
from helpers_writers import PREFIX, linear_keys, per_expert_keys, random_adapter, save
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from vexpert import LLM
from vexpert.config import EngineConfig
from vexpert.engine.engine import Engine
from vexpert.lora.build_extras import SUPPORTED
from vexpert.lora.reader import read_adapter
from vexpert.lora.types import AdapterWeights, ExpertsTarget, TargetMap
from vexpert.models.loader import serve

IDS = [5, 9, 3, 14, 7, 39, 2, 2, 11, 5, 60, 9]
Q, OUT, GATE = ".self_attn.q_proj.", ".self_attn.o_proj.", ".mlp.gate."
FOLDER = str(Path(__file__).parent)  # without a generation_config.json, and never asked for online
Tensors = dict[str, torch.Tensor]


class Files:
    """Writes adapters for one model, each with its own random numbers."""

    def __init__(self, model: Any, root: Path) -> None:
        self.model = model
        self.root = root
        self.targets: TargetMap = target_map(model)
        self.generator = torch.Generator().manual_seed(3)
        weights = random_adapter(self.targets, 2, 1.0, self.generator)
        keys = linear_keys(weights, self.targets) | per_expert_keys(weights, self.targets)
        self.factors = {
            key: 0.3 * x for key, x in keys.items() if key.endswith("weight") and "embed" not in key
        }

    def draw(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator)

    def some(self, *names: str) -> Tensors:
        """Factors of modules with one of `names` in their path."""
        return {k: x for k, x in self.factors.items() if any(name in k for name in names)}

    def changed(self, *parameters: str) -> Tensors:
        """Full parameters near those of the model."""
        state = self.model.state_dict()
        return {
            PREFIX + name: state[name] + 0.3 * state[name].std() * self.draw(*state[name].shape)
            for name in parameters
        }

    def save(self, name: str, tensors: Tensors, **config: Any) -> Path:
        return save(self.root / name, tensors, **{"r": 2, "lora_alpha": 3, **config})

    def with_magnitudes(self, factors: Tensors) -> Tensors:
        magnitudes = {
            key.replace("lora_B.weight", "lora_magnitude_vector"): 1.0 + self.draw(len(x)).abs()
            for key, x in factors.items()
            if key.endswith("lora_B.weight")
        }
        return factors | magnitudes

    def with_biases(self, factors: Tensors) -> Tensors:
        biases = {
            key.replace("B.weight", "B.bias"): 0.3 * self.draw(len(x))
            for key, x in factors.items()
            if key.endswith("lora_B.weight")
        }
        return factors | biases


def plain(files: Files) -> Path:
    return files.save("plain", files.factors)


def bias(files: Files) -> Path:
    return files.save("bias", files.with_biases(files.some(Q, OUT)), lora_bias=True)


def dora(files: Files) -> Path:
    chosen = files.some("self_attn.", GATE, "lm_head", ".shared_expert")
    return files.save("dora", files.with_magnitudes(chosen), use_dora=True)


def expert_dora(files: Files) -> Path:
    """Not every expert, nor every projection, is adapted."""
    chosen = {
        key: x
        for key, x in files.some(".experts.").items()
        if ".experts.1." not in key and not (".experts.2." in key and "gate_proj" in key)
    }
    return files.save("expert_dora", files.with_magnitudes(chosen), use_dora=True)


def full_head(files: Files) -> Path:
    return files.save("full_head", files.some(Q) | files.changed("lm_head.weight"))


def full_embedding(files: Files) -> Path:
    changed = files.changed("model.embed_tokens.weight")
    return files.save("full_embedding", files.some(".experts.") | changed)


def full_router_and_linear(files: Files) -> Path:
    router = next(name for name in files.model.state_dict() if name.endswith("mlp.gate.weight"))
    changed = files.changed(router, "model.layers.1.self_attn.o_proj.weight")
    return files.save("full_router_and_linear", files.some(Q) | changed)


def tokens(files: Files) -> Path:
    table = files.model.get_input_embeddings().weight
    rows = table[[9, 5, 60]] + files.draw(3, table.shape[1])
    key = f"{PREFIX}model.embed_tokens.token_adapter.trainable_tokens_delta"
    return files.save("tokens", files.some(Q) | {key: rows}, trainable_token_indices=[9, 5, 60])


def head_tokens(files: Files) -> Path:
    rows = files.draw(2, files.model.lm_head.weight.shape[1])
    key = f"{PREFIX}lm_head.token_adapter.trainable_tokens_delta"
    indices = {"lm_head": [7, 1]}
    return files.save("head_tokens", files.some(OUT) | {key: rows}, trainable_token_indices=indices)


def all_biases(files: Files) -> Path:
    """PEFT's bias="all" changes the biases of the experts too."""
    names = [
        name
        for name in files.model.state_dict()
        if name.endswith("bias") and ".router." not in name
    ]
    assert any("gate_up_proj_bias" in name for name in names)
    return files.save("all_biases", files.some(".layers.0.mlp.experts.") | files.changed(*names))


Writer = Callable[[Files], Path]
COMMON: tuple[Writer, ...] = (plain, bias, dora, full_head, full_embedding, head_tokens, tokens)
WRITERS: dict[str, tuple[Writer, ...]] = {
    "qwen3_moe": (*COMMON, expert_dora, full_router_and_linear),
    "gpt_oss": (*COMMON, expert_dora, all_biases),
    "deepseek_v3": (plain, bias, dora, expert_dora),
    "llama4_text": (plain, dora, expert_dora),
}


def make_llm(model: Any, device: str = "cpu", **options: Any) -> LLM:
    """An LLM over a copy of `model`."""
    memory = {"lora_memory": 1 << 26, "lora_host_memory": 1 << 26}  # the default is 20% of free
    given = {"model": FOLDER, "device": device, "dtype": "float32", "max_lora_rank": 8, **memory}
    config = EngineConfig.from_options(**(given | options))
    place = torch.device(device)
    ours = serve(copy.deepcopy(model).to(place), model.config, config, torch.float32, place)
    return LLM.from_engine(Engine(config, model=ours, tokenizer=FakeTokenizer()))


def save_model(model: Any, folder: Path) -> str:
    """A checkpoint of a model with 61 tokens, and a tokenizer of words."""
    model.save_pretrained(folder)
    words = {f"t{i}": i for i in range(61)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="t0").save_pretrained(folder)
    return str(folder)


def make_model(model_type: str) -> Any:
    """Its head is not tied: the tests tie it where they mean to."""
    return tiny_model(model_type, tie_word_embeddings=False)


def read(files: Files, path: Path) -> AdapterWeights:
    named = dict(files.model.named_parameters(remove_duplicate=False))
    return read_adapter(path, files.targets, supported=SUPPORTED, base_weight=named.get)


def merged_log_probs(files: Files, path: Path | None, ids: list[int]) -> torch.Tensor:
    """What transformers gives with the adapter folded into its weights."""
    if path is None:
        return log_probs(files.model, ids)
    with applied(files.model, read(files, path)) as merged:
        return log_probs(merged, ids)


def ask(llm: LLM, names: list[str | None], ids: list[int]) -> list[torch.Tensor]:
    """Tables of the same prompt for each name, in one batch."""
    prompts = [{"prompt_token_ids": ids} for _ in names]
    return [log_prob_table(out) for out in llm.generate(prompts, ONE_TOKEN, adapter=list(names))]


def experts_of(files: Files) -> list[ExpertsTarget]:
    return [t for t in files.targets.targets.values() if isinstance(t, ExpertsTarget)]
