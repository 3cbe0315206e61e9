"""`vexpert serve` as a process of its own, with the fake engine instead of a model."""

import sys
from typing import Any

from helpers_server import BASE, NAMES, FakeEngine

from vexpert.cli import main, serve
from vexpert.config import EngineConfig
from vexpert.demo import adapter_paths


def fake_engine(config: EngineConfig, modules: list[serve.LoraModule]) -> Any:
    engine = FakeEngine(config)
    for module in modules:
        engine.load_adapter(module.name, module.path)
    return engine


def demo(config: EngineConfig, modules: list[serve.LoraModule], names: list[str]) -> Any:
    paths = adapter_paths()
    bundled = [serve.LoraModule(name, str(paths[name])) for name in NAMES]
    return config, [*bundled, *modules], tuple(names) or (BASE,)


if __name__ == "__main__":
    serve.build_engine = fake_engine
    serve.resolve_model = demo
    sys.exit(main.main(sys.argv[1:]))
