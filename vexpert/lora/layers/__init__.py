"""A model's modules with LoRA: each runs its base path alone until a row of the step needs more."""

from vexpert.lora.layers.embedding import LoraEmbedding
from vexpert.lora.layers.experts import experts_hooks
from vexpert.lora.layers.latent import LatentLinear
from vexpert.lora.layers.linear import LoraLinear, LoraLmHead
from vexpert.lora.layers.packed_linear import LoraPackedLinear
from vexpert.lora.layers.router import wrap_router

__all__ = [
    "LatentLinear",
    "LoraEmbedding",
    "LoraLinear",
    "LoraLmHead",
    "LoraPackedLinear",
    "experts_hooks",
    "wrap_router",
]
