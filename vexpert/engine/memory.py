"""How many KV blocks fit: the cache's byte budget, decided once at boot and logged."""

from dataclasses import dataclass

import torch

from vexpert.config import EngineConfig
from vexpert.errors import ConfigError
from vexpert.free_memory import free_host_memory
from vexpert.models.types import ModelInfo

CPU_SHARE = 0.25  # of free memory, at most, for the KV cache of a CPU
MIB = 2**20


@dataclass(frozen=True)
class CacheBudget:
    """The decision, and the reason to show."""

    num_blocks: int
    block_bytes: int
    reason: str


def decide_cache(
    config: EngineConfig, info: ModelInfo, max_model_len: int, reserved: int = 0
) -> CacheBudget:
    """Blocks of the KV cache; ConfigError if one sequence of max_model_len tokens cannot fit.

    `reserved`: bytes of a GPU that something else will take later.
    """
    block_bytes = max(1, config.block_size * info.cache_bytes_per_token)
    per_sequence = -(-max_model_len // config.block_size)
    most = config.max_num_seqs * per_sequence
    if config.kv_cache_memory is not None:
        budget, reason = config.kv_cache_memory, "kv_cache_memory"
        if info.device.type == "cpu" and budget > (free := free_host_memory()):
            raise ConfigError(f"kv_cache_memory={budget}: {free} bytes are free; use less")
    elif info.device.type == "cuda":
        budget = _cuda_budget(config, info.device) - reserved
        reason = f"gpu_memory_utilization={config.gpu_memory_utilization:g}"
    else:
        budget = int(CPU_SHARE * free_host_memory())
        reason = f"{CPU_SHARE:.0%} of free memory"
        if budget >= most * block_bytes:
            budget = most * block_bytes
            reason = f"max_num_seqs={config.max_num_seqs} sequences of {max_model_len} tokens"
    num_blocks = budget // block_bytes
    if num_blocks < per_sequence:
        raise ConfigError(
            _too_small(budget, reason, num_blocks, block_bytes, config, max_model_len)
        )
    return CacheBudget(num_blocks, block_bytes, reason)


def _cuda_budget(config: EngineConfig, device: torch.device) -> int:
    free, total = torch.cuda.mem_get_info(device)
    return int(config.gpu_memory_utilization * total) - (total - free)


def _too_small(
    budget: int,
    reason: str,
    num_blocks: int,
    block_bytes: int,
    config: EngineConfig,
    max_model_len: int,
) -> str:
    need = -(-max_model_len // config.block_size) * block_bytes
    room = max(0, num_blocks) * config.block_size
    remedy = f"lower max_model_len to at most {room}, or " if room else ""
    option = (
        "raise gpu_memory_utilization"
        if reason.startswith("gpu_memory_utilization")
        else f"set kv_cache_memory to at least {need}"
    )
    return (
        f"the KV cache has {budget} bytes ({reason}), room for {room} tokens, but one sequence of"
        f" max_model_len={max_model_len} tokens needs {need} bytes: {remedy}{option}"
    )
