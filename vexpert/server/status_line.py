"""One log line every few seconds while there is something to tell."""

import asyncio

from vexpert.engine.outputs import EngineStats
from vexpert.log import get_logger
from vexpert.server.engine_thread import AsyncEngine

logger = get_logger(__name__)


def status_line(before: EngineStats, now: EngineStats, seconds: float) -> str:
    """What happened in `seconds` between two looks at the engine."""
    prompt = (now.prompt_tokens - before.prompt_tokens) / seconds
    generated = (now.generation_tokens - before.generation_tokens) / seconds
    used = 100 * now.kv_blocks_used / max(now.kv_blocks_total, 1)
    return (
        f"running {now.num_running}, waiting {now.num_waiting}, prompt {prompt:.1f} tok/s, "
        f"generation {generated:.1f} tok/s, KV blocks {used:.1f}%, "
        f"adapters {' '.join(now.running_adapters) or '-'}"
    )


async def log_status(engine: AsyncEngine, interval: float) -> None:
    """Log a line each `interval` seconds, unless nothing was generated. Ends when cancelled."""
    before = await engine.stats()
    while engine.failure is None:
        await asyncio.sleep(interval)
        now = await engine.stats()
        if now.num_running or now.steps != before.steps:
            logger.info("%s", status_line(before, now, interval))
        before = now
