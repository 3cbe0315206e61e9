"""How many bytes of device memory adapters may take."""

import os
from pathlib import Path

import torch

from vexpert.config import EngineConfig
from vexpert.errors import ConfigError
from vexpert.lora.pack import align_up, packed_elements, start_alignment
from vexpert.lora.types import (
    AdapterWeights,
    EmbeddingTarget,
    ExpertsFactors,
    Factors,
    LinearTarget,
    Target,
    TargetMap,
)

FREE_SHARE = 0.2  # of free memory, at most, unless `lora_memory` says otherwise


def _full(experts: int, out: int, width: int, rank: int) -> Factors:
    shape_a, shape_b = (experts, rank, width), (experts, out, rank)
    return Factors(torch.empty(shape_a, device="meta"), torch.empty(shape_b, device="meta"), 1.0)


def _full_module(target: Target) -> Factors | ExpertsFactors:
    """Factors without data of the largest rank, nothing shared."""
    if isinstance(target, EmbeddingTarget):
        return _full(1, target.embedding_dim, target.num_embeddings, target.site.max_rank)
    if isinstance(target, LinearTarget):
        return _full(1, target.out_features, target.in_features, target.site.max_rank)
    count, rank = target.num_experts, target.down.max_rank
    inner, hidden = target.intermediate_size, target.hidden_size
    gate = _full(count, inner, hidden, rank) if target.has_gate else None
    return ExpertsFactors(
        gate, _full(count, inner, hidden, rank), _full(count, hidden, inner, rank)
    )


def full_adapter_bytes(targets: TargetMap, device: torch.device, dtype: torch.dtype) -> int:
    """Bytes in the arena of an adapter of the largest rank on every target, nothing shared."""
    modules = {path: _full_module(target) for path, target in targets.targets.items()}
    elements = packed_elements(AdapterWeights(modules), targets, dtype)
    return align_up(elements, start_alignment(targets, device, dtype)) * dtype.itemsize


def free_bytes(device: torch.device) -> int:
    """Memory that is free now on `device`."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    # No such count elsewhere (macOS): assume that half of the machine's memory is free.
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def arena_bytes(
    targets: TargetMap, config: EngineConfig, device: torch.device, dtype: torch.dtype
) -> int:
    """Size of the arena: `lora_memory`, or `max_loras` full adapters within 20% of free memory."""
    if config.lora_memory is not None:
        if config.lora_memory < 0:
            raise ConfigError(f"lora_memory={config.lora_memory}: bytes, at least 0")
        return config.lora_memory
    wanted = config.max_loras * full_adapter_bytes(targets, device, dtype)
    return min(wanted, int(free_bytes(device) * FREE_SHARE))
