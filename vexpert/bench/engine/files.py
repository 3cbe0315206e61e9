"""A model's folder without weights, and random adapters for it, as files."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from vexpert.errors import ConfigError


@dataclass(frozen=True)
class ModelShape:
    """A Qwen3-MoE of any size."""

    name: str
    hidden: int
    inter: int
    experts: int
    top_k: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    vocab: int

    def config(self) -> Any:
        """The transformers config."""
        from transformers import Qwen3MoeConfig

        return Qwen3MoeConfig(
            hidden_size=self.hidden,
            moe_intermediate_size=self.inter,
            intermediate_size=self.inter,
            num_experts=self.experts,
            num_experts_per_tok=self.top_k,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            num_hidden_layers=self.layers,
            vocab_size=self.vocab,
            max_position_embeddings=40_960,
            tie_word_embeddings=False,
            norm_topk_prob=True,
            bos_token_id=0,
            eos_token_id=1,
            pad_token_id=0,
            architectures=["Qwen3MoeForCausalLM"],
            dtype="bfloat16",  # what "auto" means for a model without weights
        )

    def linears(self) -> dict[str, tuple[int, int]]:
        """(inputs, outputs) of the attention's projections."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "q_proj": (self.hidden, q),
            "k_proj": (self.hidden, kv),
            "v_proj": (self.hidden, kv),
            "o_proj": (q, self.hidden),
        }

    def expert(self) -> dict[str, tuple[int, int]]:
        """(inputs, outputs) of one expert's projections."""
        return {
            "gate_proj": (self.hidden, self.inter),
            "up_proj": (self.hidden, self.inter),
            "down_proj": (self.inter, self.hidden),
        }


ALL_SHAPES = (
    # Qwen3-30B-A3B cut to 8 layers and 32,000 tokens, as the other systems' figures were taken.
    ModelShape("qwen3-30b-a3b-8l", 2048, 768, 128, 8, 32, 4, 128, 8, 32_000),
    ModelShape("qwen3-30b-a3b", 2048, 768, 128, 8, 32, 4, 128, 48, 151_936),
    ModelShape("small", 256, 256, 32, 4, 8, 4, 32, 8, 32_000),
    ModelShape("mini", 128, 96, 16, 4, 4, 2, 32, 4, 2_000),
    ModelShape("tiny", 64, 48, 8, 2, 4, 2, 16, 2, 500),
)
SHAPES = {shape.name: shape for shape in ALL_SHAPES}


def find_model_shape(name: str) -> ModelShape:
    """Raises ConfigError for an unknown name."""
    if name not in SHAPES:
        raise ConfigError(f"shape={name!r}: unknown; use one of {', '.join(SHAPES)}")
    return SHAPES[name]


def write_model(folder: Path, shape: ModelShape) -> None:
    """Config and tokenizer; for load_format="dummy"."""
    shape.config().save_pretrained(folder)
    write_tokenizer(folder, shape.vocab)


def write_tokenizer(folder: Path, vocab: int) -> None:
    """A tokenizer of `vocab` words t0, t1, ..."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"t{i}": i for i in range(vocab)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="t0", eos_token="t1")
    fast.save_pretrained(folder)


def write_adapter(folder: Path, shape: ModelShape, rank: int, seed: int) -> int:
    """A pair for each projection of each expert and of attention, in bfloat16; its bytes.

    As PEFT writes it with transformers 4.
    """
    generator = torch.Generator().manual_seed(seed)
    modules = {}
    for layer in range(shape.layers):
        for name, sides in shape.linears().items():
            modules[f"model.layers.{layer}.self_attn.{name}"] = sides
        for expert in range(shape.experts):
            for name, sides in shape.expert().items():
                modules[f"model.layers.{layer}.mlp.experts.{expert}.{name}"] = sides
    tensors = {}
    for name, (inputs, outputs) in modules.items():
        for part, size in (("A", (rank, inputs)), ("B", (outputs, rank))):
            x = torch.randn(size, generator=generator) * 0.02
            tensors[f"base_model.model.{name}.lora_{part}.weight"] = x.to(torch.bfloat16)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "peft_version": "0.17.0"}
    names = [*shape.linears(), *shape.expert()]
    (folder / "adapter_config.json").write_text(json.dumps(fields | {"target_modules": names}))
    return sum(x.nbytes for x in tensors.values())


def link_adapter(folder: Path, to: Path) -> Path:
    """Another folder with the same files: other bytes would take no other time."""
    folder.mkdir()
    for file in to.iterdir():
        (folder / file.name).symlink_to(file)
    return folder
