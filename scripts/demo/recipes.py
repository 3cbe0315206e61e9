"""What is trained: the base model's shape, and each adapter's ranks and targets."""

from dataclasses import dataclass, field
from typing import Any

from peft import LoraConfig
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig

MAX_POSITIONS = 512
BASE_NAME = "vexpert-demo"

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


@dataclass(frozen=True)
class Recipe:
    """One training run: ``steps`` steps of ``words`` words; ``lora`` is LoraConfig's arguments."""

    steps: int
    words: int
    learning_rate: float
    lora: dict[str, Any] = field(default_factory=dict)

    def lora_config(self) -> LoraConfig:
        return LoraConfig(task_type="CAUSAL_LM", lora_dropout=0.0, bias="none", **self.lora)


def base_config(tokenizer: PreTrainedTokenizerFast) -> Qwen3MoeConfig:
    """4 layers of 16 experts, top-2."""
    return Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        moe_intermediate_size=64,
        num_experts=16,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        initializer_range=0.06,  # about 1 / sqrt(3 * hidden_size): 0.02 learns slowly at this width
        router_aux_loss_coef=0.01,
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )


# Ranks, targets and scales all differ, to exercise a server that batches unlike adapters.
RECIPES: dict[str, Recipe] = {
    "base": Recipe(steps=1500, words=192, learning_rate=3e-3),
    "upper": Recipe(
        steps=400,
        words=192,
        learning_rate=5e-3,
        lora={"r": 4, "lora_alpha": 8, "target_modules": [], "target_parameters": EXPERTS},
    ),
    "reverse": Recipe(
        steps=600,
        words=192,
        learning_rate=3e-3,
        lora={"r": 16, "lora_alpha": 16, "target_modules": ATTENTION, "target_parameters": EXPERTS},
    ),
    "sort": Recipe(
        steps=1600,
        words=192,
        learning_rate=3e-3,
        lora={
            "r": 12,
            "lora_alpha": 24,
            "rank_pattern": dict.fromkeys(ATTENTION, 32),
            "alpha_pattern": dict.fromkeys(ATTENTION, 64),
            "target_modules": ATTENTION,
            "target_parameters": EXPERTS,
        },
    ),
    "shift": Recipe(
        steps=400,
        words=192,
        learning_rate=4e-3,
        lora={
            "r": 8,
            "lora_alpha": 8,
            "use_rslora": True,
            "target_modules": ["q_proj", "v_proj"],
            "target_parameters": EXPERTS[1:],
        },
    ),
}
