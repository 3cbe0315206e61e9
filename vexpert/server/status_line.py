"""One log line every few seconds while there is something to tell."""

import asyncio

from vexpert.engine.outputs import EngineStats
from vexpert.log import get_logger
from vexpert.lora.info import TierUsage
from vexpert.server.engine_client import AsyncEngine
from vexpert.server.progress import EngineFailedError

logger = get_logger(__name__)

SHOWN_NAMES = 8


def status_line(before: EngineStats, now: EngineStats, seconds: float) -> str:
    """What happened in `seconds` between two looks at the engine."""
    prompt = (now.prompt_tokens - before.prompt_tokens) / seconds
    generated = (now.generation_tokens - before.generation_tokens) / seconds
    used = 100 * now.kv_blocks_used / max(now.kv_blocks_total, 1)
    return (
        f"running {now.num_running}, waiting {now.num_waiting}, prompt {prompt:.1f} tok/s, "
        f"generation {generated:.1f} tok/s, KV blocks {used:.1f}%, "
        f"adapters {_names(now.running_adapters)}{_device(now.adapters)}"
    )


def _names(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
    return (" ".join(names[:SHOWN_NAMES]) or "-") + more


def _device(usage: TierUsage) -> str:
    if not usage.device_used:
        return ""
    return (
        f", {usage.device_adapters} on the device: {usage.device_used / 2**20:.1f} of "
        f"{usage.device_bytes / 2**20:.1f} MiB, {usage.waste:.1%} of it padding"
    )


async def log_status(engine: AsyncEngine, interval: float) -> None:
    """Log a line each `interval` seconds, unless nothing was generated. Ends when cancelled."""
    before = None
    while True:
        try:
            now = await engine.stats()
        except EngineFailedError:
            before = None  # it starts again, or the server ends
        else:
            if before and (now.num_running or now.steps != before.steps):
                logger.info("%s", status_line(before, now, interval))
            before = now
        await asyncio.sleep(interval)
