"""Tiny random models of many architectures, and a driver that plays random schedules on them."""

import random
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from vexpert.config import EngineConfig
from vexpert.lora.types import BatchView
from vexpert.models.loader import serve
from vexpert.models.served import TransformersModel
from vexpert.models.types import ServedModel, StepInput

torch.set_num_threads(1)  # products this small lose more by waiting for threads than they gain
VOCAB = 61
# Non-square on purpose: hidden 40, heads 4 of width 12 (KV 2), intermediate 28, experts 6 of 20.
SHRINK: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 40,
    "intermediate_size": 28,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 128,
    "num_experts": 6,
    "num_local_experts": 6,
    "n_routed_experts": 6,
    "moe_num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 24,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "moe_num_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "sliding_window": 7,
    "attention_chunk_size": 6,
    "rope_theta": 10000.0,
}
OVERRIDES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"head_dim": 12},
    "mixtral": {"sliding_window": 7, "head_dim": 12},
    "gpt_oss": {"layer_types": ["sliding_attention", "full_attention"]},
    "deepseek_v2": {"num_key_value_heads": 4, "topk_method": "greedy", "head_dim": None},
    "deepseek_v3": {"num_key_value_heads": 4, "head_dim": None},
    "glm4_moe": {"use_qk_norm": True, "partial_rotary_factor": 0.5, "head_dim": 16},
    "minimax_m2": {"rotary_dim": 8},
    "ernie4_5_moe": {
        "moe_layer_start_index": 0,
        "moe_layer_end_index": 1,
        "moe_layer_interval": 1,
    },
    "granitemoe": {
        "attention_multiplier": 0.2,
        "logits_scaling": 2.0,
        "residual_multiplier": 0.7,
        "embedding_multiplier": 3.0,
        "head_dim": None,
    },
    "axk1": {"num_key_value_heads": 4, "head_dim": None},
    "sarvam_mla": {"num_key_value_heads": 4, "head_dim": None},
    "youtu": {"num_key_value_heads": 4, "head_dim": None},
    "deepseek_v32": {"num_key_value_heads": 4, "head_dim": None},
    "glm_moe_dsa": {"num_key_value_heads": 4, "head_dim": None},
    "hy_v4": {"num_key_value_heads": 4, "head_dim": None},
    "minicpm3": {"num_key_value_heads": 4, "head_dim": None},
    "jamba": {"mamba_d_state": 4, "attn_layer_period": 2, "attn_layer_offset": 1},
    "beam": {
        "layer_types": ["sliding_attention", "full_attention"],
        "mlp_layer_types": ["dense", "sparse"],
    },
    "exaone_moe": {"layer_types": ["sliding_attention", "full_attention"]},
    "flint": {"layer_types": ["sliding_attention", "full_attention"], "mlp_only_layers": []},
    "gemma4_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "vocab_size_per_layer_input": VOCAB,
        "hidden_size_per_layer_input": 8,
        "enable_moe_block": True,
        "num_experts": 6,
        "top_k_experts": 2,
        "moe_intermediate_size": 20,
        "global_head_dim": 16,
    },
    "glm4_moe_lite": {"num_key_value_heads": 4},
    "laguna": {"layer_types": ["sliding_attention", "full_attention"]},
    "mellum": {"layer_types": ["sliding_attention", "full_attention"]},
    "phimoe": {"head_dim": None, "sliding_window": 7},
    "llama4_text": {
        "num_hidden_layers": 4,
        "intermediate_size_mlp": 36,
        "interleave_moe_layer_step": 2,
        "num_experts_per_tok": 2,
        "no_rope_layers": [1, 1, 1, 0],
        "floor_scale": 4,
        "attn_scale": 0.5,
        "use_qk_norm": True,
    },
}


def tiny_config(model_type: str, **overrides: Any) -> Any:
    """A small config of `model_type`: those of SHRINK's fields that it has, then overrides."""
    default = AutoConfig.for_model(model_type).get_text_config()
    known = set(default.to_dict()) | set(type(default).attribute_map)
    fields = {name: value for name, value in SHRINK.items() if name in known}
    wanted = fields | OVERRIDES.get(model_type, {}) | overrides
    return type(default)(**{k: v for k, v in wanted.items() if v is not None or k != "head_dim"})


def tiny_model(model_type: str, seed: int = 0, **overrides: Any) -> Any:
    """A random float32 model in eager mode, with weights large enough for routing to matter."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(
            tiny_config(model_type, **overrides), dtype=torch.float32, attn_implementation="eager"
        ).eval()
        model.requires_grad_(False)
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if tensor.is_floating_point() and "inv_freq" not in name:
                _randomize(name, tensor)
    return model


def _randomize(name: str, tensor: torch.Tensor) -> None:
    if tensor.dim() >= 2:
        fan_in = min(tensor.shape[-2:]) if tensor.dim() == 3 else tensor.shape[-1]
        tensor.normal_(0.0, 1.2 * fan_in**-0.5)
        if "embed" in name:
            tensor.mul_(fan_in**0.5)
    elif "norm" in name and "bias" not in name:
        tensor.add_(0.2 * torch.randn_like(tensor))
    elif tensor.dim() == 1:
        tensor.normal_(0.0, 0.2)


def reference_logits(model: Any, sequences: list[list[int]]) -> list[torch.Tensor]:
    """transformers' own logits [len, vocab], sequences one by one without a cache."""
    model.config._attn_implementation = "eager"
    with torch.inference_mode():
        return [
            model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float()
            for ids in sequences
        ]


def served(model: Any, **options: Any) -> TransformersModel:
    """`model`, changed in place, behind ServedModel; without LoRA layers unless asked for."""
    facts: dict[str, Any] = {"model": "tiny", "device": "cpu", "enable_lora": False, **options}
    config = EngineConfig(**facts)
    return serve(model, model.config, config, model.dtype, torch.device("cpu"))


def random_sequences(count: int, longest: int, seed: int, vocab: int = VOCAB) -> list[list[int]]:
    """`count` random token lists of 3 to `longest` tokens; the first has the full length."""
    rng = random.Random(seed)
    lengths = [longest] + [rng.randint(3, longest) for _ in range(count - 1)]
    return [[rng.randrange(3, vocab) for _ in range(length)] for length in lengths]


@dataclass
class Driver:
    """Feeds sequences through a served model in steps, with blocks in shuffled order."""

    model: ServedModel
    block_size: int = 4
    num_blocks: int = 64
    seed: int = 0
    free: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.free = list(range(self.num_blocks))
        self.rng.shuffle(self.free)
        self.model.allocate_cache(self.num_blocks, self.block_size)

    def play(
        self, sequences: list[list[int]], slots: list[int] | None = None
    ) -> list[torch.Tensor]:
        """Logits [len, vocab] of each sequence, from random chunks and decodes mixed in steps."""
        blocks: list[list[int]] = [[] for _ in sequences]
        done = [0] * len(sequences)
        rows: list[list[torch.Tensor]] = [[] for _ in sequences]
        while any(n < len(ids) for n, ids in zip(done, sequences, strict=True)):
            chosen = self._choose(done, sequences)
            step = self._step(chosen, done, sequences, blocks, slots)
            logits = torch.split(self.model.forward(step), [n for _, n in chosen])
            for (index, count), part in zip(chosen, logits, strict=True):
                rows[index].append(part)
                done[index] += count
        for own in blocks:
            self.free.extend(own)
        return [torch.cat(parts) for parts in rows]

    def whole_step(self, ids: list[int], logit_rows: list[int]) -> StepInput:
        """One sequence as one chunk, in blocks of its own that stay taken."""
        step = self._step([(0, len(ids))], [0], [ids], [[]], None)
        return replace(step, logit_rows=torch.tensor(logit_rows))

    def _choose(self, done: list[int], sequences: list[list[int]]) -> list[tuple[int, int]]:
        """A random non-empty set of unfinished sequences, each with a decode or a chunk."""
        open_ = [i for i, ids in enumerate(sequences) if done[i] < len(ids)]
        chosen = self.rng.sample(open_, self.rng.randint(1, len(open_)))
        pairs = []
        for index in chosen:
            left = len(sequences[index]) - done[index]
            count = 1 if self.rng.random() < 0.5 else self.rng.randint(1, min(left, 13))
            pairs.append((index, count))
        return pairs

    def _step(
        self,
        chosen: list[tuple[int, int]],
        done: list[int],
        sequences: list[list[int]],
        blocks: list[list[int]],
        slots: list[int] | None,
    ) -> StepInput:
        tokens: list[int] = []
        positions: list[int] = []
        cache_rows: list[int] = []
        for index, count in chosen:
            own, size = blocks[index], self.block_size
            while len(own) * size < done[index] + count:
                own.append(self.free.pop())
            span = range(done[index], done[index] + count)
            tokens += [sequences[index][p] for p in span]
            positions += span
            cache_rows += [own[p // size] * size + p % size for p in span]
        width = max(len(blocks[index]) for index, _ in chosen)
        tables = [blocks[index] + [0] * (width - len(blocks[index])) for index, _ in chosen]
        return StepInput(
            token_ids=torch.tensor(tokens),
            positions=torch.tensor(positions),
            query_lens=tuple(count for _, count in chosen),
            context_lens=tuple(done[index] + count for index, count in chosen),
            block_tables=torch.tensor(tables),
            cache_rows=torch.tensor(cache_rows),
            logit_rows=torch.arange(len(tokens)),
            lora=None if slots is None else _view([slots[i] for i, n in chosen for _ in range(n)]),
        )


def _view(slots: list[int]) -> BatchView:
    row_slots = torch.tensor(slots)
    return BatchView(row_slots, row_slots, tuple(sorted({slot for slot in slots if slot >= 0})))


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """||got - want|| / ||want||."""
    return float((got - want).norm() / want.norm())


def worst_error(
    model: Any, seed: int = 0, longest: int = 33, count: int = 5, use_kernels: bool = False
) -> float:
    """The largest relative error of any logits row, served against transformers eager.

    use_kernels: attention as on a GPU, by kernels over the paged cache.
    """
    vocab = model.get_input_embeddings().weight.shape[0]
    sequences = random_sequences(count, longest, seed, min(vocab, VOCAB))
    want = reference_logits(model, sequences)
    ours = served(model)
    if use_kernels:
        for layer in ours.layers:
            layer.use_kernels = True
    got = Driver(ours, seed=seed).play(sequences)
    return max(
        relative_error(row, truth)
        for ours, theirs in zip(got, want, strict=True)
        for row, truth in zip(ours, theirs, strict=True)
    )
