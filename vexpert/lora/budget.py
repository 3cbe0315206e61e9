"""How many bytes of device memory adapters may take."""

import torch

from vexpert.config import EngineConfig
from vexpert.free_memory import free_host_memory
from vexpert.lora.host_memory import SLAB_BYTES
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

FREE_SHARE = 0.2  # of free memory, on the device and on the host, unless an option says otherwise
# Adapters on the device at once, unless `max_loras` says otherwise: bytes are the limit, a slot
# costs one column of the tables. A CPU's backends look at every column of a site at each step.
GPU_SLOTS, CPU_SLOTS = 1024, 256
SLAB_ADAPTERS = 8
GPU_READERS = 2


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
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_host_memory()


def slot_count(config: EngineConfig, device: torch.device) -> int:
    """Columns of the tables."""
    if config.max_loras is not None:
        return config.max_loras
    return GPU_SLOTS if device.type == "cuda" else CPU_SLOTS


def reader_count(config: EngineConfig, device: torch.device) -> int:
    """Processes that read adapters; 0: threads of this one do.

    In front of a GPU, whose steps are short, no load may hold the interpreter's lock. On a CPU a
    load takes the cores that the steps compute on, wherever it runs.
    """
    if config.lora_readers is not None:
        return config.lora_readers
    return GPU_READERS if device.type == "cuda" else 0


def arena_bytes(
    targets: TargetMap, config: EngineConfig, device: torch.device, dtype: torch.dtype
) -> int:
    """Size of the arena: `lora_memory`, or 20% of free memory.

    Less where that many slots of the largest adapters would not fill it.
    """
    if config.lora_memory is not None:
        return config.lora_memory
    wanted = slot_count(config, device) * full_adapter_bytes(targets, device, dtype)
    return min(wanted, int(free_bytes(device) * FREE_SHARE))


def host_bytes(config: EngineConfig) -> int:
    """Most bytes of adapters in host memory: `lora_host_memory`, or 20% of what is free."""
    if config.lora_host_memory is not None:
        return config.lora_host_memory
    return int(free_bytes(torch.device("cpu")) * FREE_SHARE)


def slab_bytes(
    targets: TargetMap, config: EngineConfig, device: torch.device, dtype: torch.dtype
) -> int:
    """Host memory to pin at once: room for some of the largest adapters, within the budget."""
    some = SLAB_ADAPTERS * full_adapter_bytes(targets, device, dtype)
    return max(1, min(SLAB_BYTES, some, host_bytes(config)))
