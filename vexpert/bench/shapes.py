"""Layer shapes by name: the experts of well-known models, made by transformers' own classes."""

import importlib
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import nn

from vexpert.errors import ConfigError


@dataclass(frozen=True)
class LayerShape:
    """One MoE layer. `module`: the experts' class, as `file under transformers.models`:`class`."""

    name: str
    module: str
    hidden: int
    inter: int
    experts: int
    top_k: int

    def outline(self) -> nn.Module:
        """The experts on the meta device."""
        path, _, name = self.module.partition(":")
        experts_class = getattr(importlib.import_module(f"transformers.models.{path}"), name)
        with torch.device("meta"):
            module: nn.Module = experts_class(self._config())
        return module

    def make(self, device: torch.device, dtype: torch.dtype, seed: int) -> nn.Module:
        """Experts with random weights whose outputs are about as large as their inputs."""
        module = self.outline()
        module.to(dtype).to_empty(device=device).requires_grad_(False)
        generator = torch.Generator(device).manual_seed(seed)
        for name, parameter in module.named_parameters():
            parameter.normal_(std=self._std(name), generator=generator)
        return module

    def _config(self) -> SimpleNamespace:
        """What any of the classes reads of its model's config."""
        return SimpleNamespace(
            hidden_size=self.hidden,
            intermediate_size=self.inter,
            moe_intermediate_size=self.inter,
            num_experts=self.experts,
            num_local_experts=self.experts,
            hidden_act="silu",
            swiglu_alpha=1.702,
            swiglu_limit=7.0,
        )

    def _std(self, parameter: str) -> float:
        if parameter.endswith("bias"):
            return 0.5
        return float((self.inter if parameter.startswith("down") else self.hidden) ** -0.5)


QWEN3 = "qwen3_moe.modeling_qwen3_moe:Qwen3MoeExperts"
GPT_OSS = "gpt_oss.modeling_gpt_oss:GptOssExperts"
MIXTRAL = "mixtral.modeling_mixtral:MixtralExperts"
DEEPSEEK_V2 = "deepseek_v2.modeling_deepseek_v2:DeepseekV2Experts"
QWEN3_5 = "qwen3_5_moe.modeling_qwen3_5_moe:Qwen3_5MoeExperts"
ALL_SHAPES = (
    LayerShape("qwen3-30b-a3b", QWEN3, 2048, 768, 128, 8),
    LayerShape("mixtral-8x7b", MIXTRAL, 4096, 14336, 8, 2),
    LayerShape("gpt-oss-20b", GPT_OSS, 2880, 2880, 32, 4),
    LayerShape("deepseek-v2-lite", DEEPSEEK_V2, 2048, 1408, 64, 6),
    LayerShape("qwen3.5-35b-a3b", QWEN3_5, 2048, 512, 256, 8),
    LayerShape("tiny", QWEN3, 64, 48, 8, 2),
    LayerShape("tiny-gpt-oss", GPT_OSS, 64, 48, 8, 2),
)
SHAPES = {shape.name: shape for shape in ALL_SHAPES}


def find_shape(name: str) -> LayerShape:
    """By name, or HxIxExK for a layer of plain gated experts. Raises ConfigError for others."""
    if name in SHAPES:
        return SHAPES[name]
    sizes = [int(part) for part in name.split("x") if part.isdecimal()]
    if len(sizes) != 4 or len(name.split("x")) != 4 or not 0 < sizes[3] <= sizes[2]:
        raise ConfigError(
            f"shape={name!r}: unknown; use one of {', '.join(SHAPES)}, or HxIxExK: hidden,"
            " intermediate, experts, experts of a token"
        )
    return LayerShape(name, QWEN3, *sizes)
