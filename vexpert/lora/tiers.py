"""The tiers of one engine, with the memory that they fill: allocated here, and counted."""

from collections.abc import Callable
from dataclasses import dataclass
from threading import RLock

import torch

from vexpert.config import EngineConfig, allocating
from vexpert.lora.adapter_version import Version
from vexpert.lora.budget import arena_bytes, host_bytes, reader_count, slab_bytes, slot_count
from vexpert.lora.device_tier import DeviceTier
from vexpert.lora.host_memory import HostMemory
from vexpert.lora.host_tier import HostTier
from vexpert.lora.pool import SlotPool
from vexpert.lora.source import AdapterLoader
from vexpert.lora.types import TierUsage


@dataclass(frozen=True)
class Tiers:
    """Where the weights of versions may be, beside their files."""

    device: DeviceTier
    host: HostTier

    def usage(self, known: int) -> TierUsage:
        """What they hold now, of `known` names."""
        pool, host, device = self.device.pool, self.host, self.device
        return TierUsage(
            known=known,
            device_bytes=pool.arena.nbytes,
            device_used=pool.arena.used_bytes,
            device_payload=pool.payload_bytes,
            device_adapters=len(device.policy.in_slot),
            host_bytes=host.policy.budget,
            host_used=host.policy.used,
            host_adapters=len(host.policy),
            loading=host.loading(),
            loads=host.loads,
            load_seconds=host.load_seconds,
            errors=host.errors,
            evictions=device.policy.evictions,
        )


def make_tiers(
    loader: AdapterLoader,
    config: EngineConfig,
    device: torch.device,
    lock: RLock,
    check_size: Callable[[Version, int], None],
    settled: Callable[[Version], None],
) -> Tiers:
    """Allocate an arena on `device` and host memory, as large as `config` says; ConfigError.

    `check_size(version, nbytes)` may refuse a version before it takes host memory, and
    `settled(version)` is told when a read or a copy has ended: both are called under `lock`.
    """
    targets, dtype = loader.targets, loader.dtype
    slots = slot_count(config, device)
    size = arena_bytes(targets, config, device, dtype)
    with allocating(
        f"an arena of {size} bytes with {slots} slots", "lower lora_memory or max_loras"
    ):
        pool = SlotPool(targets, slots, size, device, dtype)
        readers = reader_count(config, device)
        slab = slab_bytes(targets, config, device, dtype)
        memory = HostMemory(device.type == "cuda", slab, shared=readers > 0)
        memory.reserve()
    host = HostTier(
        *(loader, memory, host_bytes(config), config.max_cpu_loras),
        *(lock, check_size, settled, readers),
    )
    return Tiers(DeviceTier(pool, device, settled, host.ensure), host)
