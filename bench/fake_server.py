"""`vexpert serve` with the fake engine of the tests: `fake_server.py STEPS_A_SECOND serve ...`.

0: as many steps as it makes. Used by `stream_cost.py`.
"""

import os
import sys
import time
from typing import Any

import helpers_serve_process
from helpers_fake_engine import FakeEngine

from vexpert.cli import main, serve
from vexpert.server.engine_process import EngineProcess

RATE = "VEXPERT_FAKE_RATE"  # the engine's process gets it by its environment


class PacedEngine(FakeEngine):
    """Begins its steps at a steady rate."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments, max_model_len=4096)
        self._seconds = 1 / float(os.environ[RATE]) if float(os.environ[RATE]) else 0.0
        self._next = 0.0

    def step(self) -> Any:
        now = time.perf_counter()
        if self._next > now:
            time.sleep(self._next - now)
        self._next = max(now, self._next) + self._seconds
        return super().step()


def build(config: Any, modules: Any, is_restart: bool) -> PacedEngine:
    return PacedEngine(config)


def process(config: Any, log_format: str) -> EngineProcess:
    return EngineProcess(config, build, helpers_serve_process.fake_tokenizer, log_format)


if __name__ == "__main__":
    os.environ[RATE] = sys.argv[1]
    for place in (serve, *(m for n, m in sys.modules.items() if n == "vexpert.cli.boot")):
        if hasattr(place, "engine_process"):
            place.engine_process = process
        if hasattr(place, "resolve_model"):
            place.resolve_model = helpers_serve_process.demo
    sys.exit(main.main(sys.argv[2:]))
