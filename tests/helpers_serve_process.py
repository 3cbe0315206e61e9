"""`vexpert serve` as a process of its own, with the fake engine instead of a model.

Variables of its environment let a test wait for what it needs, however long a machine takes.
"""

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from helpers_fake_engine import BASE, NAMES, FakeEngine, FakeTokenizer

from vexpert.cli import main, serve
from vexpert.config import EngineConfig
from vexpert.demo import adapter_paths
from vexpert.server.engine_process import EngineProcess
from vexpert.server.interface import LoraModule

HELD_AT = "VEXPERT_TEST_HELD_AT"  # tokens at which a request gains no more
GATE = "VEXPERT_TEST_GATE"  # a file that the engine waits for where it starts anew
PATIENT = "VEXPERT_TEST_PATIENT"  # a first signal grants more time than a test has


def wait_at_gate() -> None:
    """Go on once the file is there, if one is named."""
    gate = os.environ.get(GATE)
    while gate and not Path(gate).exists():
        time.sleep(0.01)


def fake_engine(config: EngineConfig, modules: Sequence[LoraModule], is_restart: bool) -> Any:
    time.sleep(config.max_loras or 0)  # a boot that takes a while, for tests of it
    if is_restart:
        wait_at_gate()
    engine = FakeEngine(config)
    engine.step_seconds = 0.01
    engine.held_at = int(os.environ[HELD_AT]) if HELD_AT in os.environ else None
    for module in modules:
        engine.load_adapter(module.name, module.path)
    return engine


def fake_tokenizer(config: EngineConfig) -> FakeTokenizer:
    return FakeTokenizer()


def be_patient() -> None:
    """What is still there soon after a second signal would be there for long after a first."""
    from vexpert.server import engine_client, run

    engine_client.STOP_SECONDS = run.LAST_RESORT_SECONDS = 1000.0
    run.CLOSE_SECONDS = 1000


def fake_process(config: EngineConfig, log_format: str) -> EngineProcess:
    if PATIENT in os.environ:
        be_patient()
    return EngineProcess(config, fake_engine, fake_tokenizer, log_format)


def demo(config: EngineConfig, modules: list[LoraModule], names: list[str]) -> Any:
    paths = adapter_paths()
    bundled = [LoraModule(name, str(paths[name])) for name in NAMES]
    return config, [*bundled, *modules], tuple(names) or (BASE,)


if __name__ == "__main__":
    serve.engine_process = fake_process
    serve.resolve_model = demo
    sys.exit(main.main(sys.argv[1:]))
