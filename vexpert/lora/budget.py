"""How many bytes of device memory adapters may take."""

import os
from pathlib import Path

import torch

from vexpert.config import EngineConfig
from vexpert.errors import ConfigError
from vexpert.lora.pack import ALIGN_BYTES, align_up
from vexpert.lora.types import EmbeddingTarget, TargetMap
from vexpert.ops.types import LoraSite

FREE_SHARE = 0.2  # of free memory, at most, unless `lora_memory` says otherwise


def _site_elements(site: LoraSite, is_embedding: bool) -> list[int]:
    """Elements of each tensor of a site that is adapted in full, at the largest rank."""
    rank = site.max_rank // len(site.slices)
    experts = 1 if is_embedding else site.num_experts
    factors_b = [experts * rank * output.size for output in site.slices]
    return [site.num_experts * site.max_rank * site.in_features, *factors_b]


def full_adapter_bytes(targets: TargetMap, dtype: torch.dtype) -> int:
    """Bytes of an adapter of the largest rank on every target, nothing shared."""
    embeddings = {t.site.index for t in targets.targets.values() if isinstance(t, EmbeddingTarget)}
    return sum(
        align_up(count * dtype.itemsize, ALIGN_BYTES)
        for site in targets.sites
        for count in _site_elements(site, site.index in embeddings)
    )


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
    wanted = config.max_loras * full_adapter_bytes(targets, dtype)
    return min(wanted, int(free_bytes(device) * FREE_SHARE))
