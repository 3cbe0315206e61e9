"""Making the engine that a server serves. Imports what is heavy when it is called."""

import gc
import sys
from collections.abc import Sequence

from vexpert.config import EngineConfig
from vexpert.errors import AdapterError
from vexpert.log import adopt_libraries, get_logger, quiet_libraries
from vexpert.server.interface import EngineProtocol, LoraModule, Tokenizer

logger = get_logger(__name__)
SWITCH_SECONDS = 5e-5


def build_engine(
    config: EngineConfig, modules: Sequence[LoraModule], is_restart: bool
) -> EngineProtocol:
    """The engine with its adapters. Raises VexpertError.

    In a restart adapters are read when they are first needed, and one that is refused is left out:
    the others, and the base model, are waited for.
    """
    from vexpert.engine.engine import Engine

    quiet_libraries()
    adopt_libraries()
    engine: EngineProtocol = Engine(config)
    for module in modules:
        (_register if is_restart else _load)(engine, module)
    return engine


def _load(engine: EngineProtocol, module: LoraModule) -> None:
    call = engine.register_adapter if module.lazy else engine.load_adapter
    options = {"lora_B_layout": module.lora_B_layout, "pinned": module.pinned}
    call(module.name, module.path, **options)


def _register(engine: EngineProtocol, module: LoraModule) -> None:
    options = {"lora_B_layout": module.lora_B_layout, "pinned": module.pinned}
    try:
        # In place of what --lora-dir may have registered under this name.
        engine.register_adapter(module.name, module.path, load_inplace=True, **options)
    except (AdapterError, OSError) as error:
        logger.warning("adapter %s is not served any more: %s", module.name, error)


def read_tokenizer(config: EngineConfig) -> Tokenizer:
    """The model's tokenizer, for the server's own process. Raises ModelError."""
    from vexpert.models.tokenizer import read_tokenizer

    adopt_libraries()
    tokenizer: Tokenizer = read_tokenizer(config)
    return tokenizer


def settle() -> None:
    """Keep this process's other threads from holding up the one that matters.

    A collection walks every object of the imported libraries, 0.1 s, so those are set aside. A
    step's thread gives the interpreter's lock away at each PyTorch call and waits up to the switch
    interval, 5 ms unless told otherwise, to have it back from a thread that reads an adapter.
    """
    gc.collect()
    gc.freeze()
    sys.setswitchinterval(SWITCH_SECONDS)
