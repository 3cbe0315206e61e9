"""`vexpert serve` whose requests last as long as a test needs, however long a machine holds it up.

`real`: the demo's engine, which stands still a few steps after it has begun a request of
HELD_TOKENS tokens. Where it starts anew, it first waits for the file that $VEXPERT_TEST_GATE names.
`slow`: the fake engine, with SLOW_STEP seconds a step.
"""

import sys
import time
from collections.abc import Sequence
from typing import Any

from helpers_serve_process import demo, fake_engine, fake_tokenizer, wait_at_gate

from vexpert.cli import main, serve
from vexpert.config import EngineConfig
from vexpert.server.engine_process import EngineProcess
from vexpert.server.interface import LoraModule

HELD_TOKENS = 240
SLOW_STEP = 0.5  # seconds: a request of HELD_TOKENS tokens takes two minutes


def stand_still() -> None:
    """Engines made in this process give each held request a few steps, and then none."""
    from vexpert.engine.engine import Engine

    add, step = Engine.add_request, Engine.step
    left: list[int] = []  # steps, once there is a held request

    def counted_add(self: Engine, *arguments: Any, **options: Any) -> None:
        add(self, *arguments, **options)
        if arguments[3].max_tokens == HELD_TOKENS:
            left[:] = [sum(left) + 3]

    def counted_step(self: Engine) -> Any:
        if left == [0]:
            time.sleep(0.01)
            return []
        if left:
            left[0] -= 1
        return step(self)

    Engine.add_request, Engine.step = counted_add, counted_step  # type: ignore[method-assign]


def held_engine(config: EngineConfig, modules: Sequence[LoraModule], is_restart: bool) -> Any:
    from vexpert.server.engine_boot import build_engine

    if is_restart:
        wait_at_gate()
    else:
        stand_still()
    return build_engine(config, modules, is_restart)


def slow_engine(config: EngineConfig, modules: Sequence[LoraModule], is_restart: bool) -> Any:
    engine = fake_engine(config, modules, is_restart)
    engine.step_seconds = SLOW_STEP
    return engine


def held_process(config: EngineConfig, log_format: str) -> EngineProcess:
    from vexpert.server.engine_boot import read_tokenizer

    return EngineProcess(config, held_engine, read_tokenizer, log_format)


def slow_process(config: EngineConfig, log_format: str) -> EngineProcess:
    return EngineProcess(config, slow_engine, fake_tokenizer, log_format)


if __name__ == "__main__":
    kind, *words = sys.argv[1:]
    serve.engine_process = held_process if kind == "real" else slow_process
    if kind == "slow":
        serve.resolve_model = demo
    sys.exit(main.main(words))
