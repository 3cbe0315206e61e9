"""`vexpert serve` as a process of its own, with the fake engine instead of a model."""

import sys
import time
from collections.abc import Sequence
from typing import Any

from helpers_fake_engine import BASE, NAMES, FakeEngine, FakeTokenizer

from vexpert.cli import main, serve
from vexpert.config import EngineConfig
from vexpert.demo import adapter_paths
from vexpert.server.engine_process import EngineProcess
from vexpert.server.interface import LoraModule


def fake_engine(config: EngineConfig, modules: Sequence[LoraModule], is_restart: bool) -> Any:
    time.sleep(config.max_loras or 0)  # a boot that takes a while, for tests of it
    engine = FakeEngine(config)
    engine.step_seconds = 0.01
    for module in modules:
        engine.load_adapter(module.name, module.path)
    return engine


def fake_tokenizer(config: EngineConfig) -> FakeTokenizer:
    return FakeTokenizer()


def fake_process(config: EngineConfig, log_format: str) -> EngineProcess:
    return EngineProcess(config, fake_engine, fake_tokenizer, log_format)


def demo(config: EngineConfig, modules: list[LoraModule], names: list[str]) -> Any:
    paths = adapter_paths()
    bundled = [LoraModule(name, str(paths[name])) for name in NAMES]
    return config, [*bundled, *modules], tuple(names) or (BASE,)


if __name__ == "__main__":
    serve.engine_process = fake_process
    serve.resolve_model = demo
    sys.exit(main.main(sys.argv[1:]))
