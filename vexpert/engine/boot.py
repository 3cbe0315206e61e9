"""Building an engine's parts from its config, and the lines that say what was built."""

import functools
from typing import Any

import torch

from vexpert.config import EngineConfig, allocating
from vexpert.demo import DEMO_NAME, is_demo
from vexpert.engine.adapters import AdapterSource, NoAdapters
from vexpert.engine.admission import parse_weights
from vexpert.engine.block_pool import BlockPool
from vexpert.engine.capture import Capturer, CudaCapturer
from vexpert.engine.graph_buffers import GraphBuffers
from vexpert.engine.graphs import MOST_LORA_GRAPHS, DecodeGraphs, graph_sizes
from vexpert.engine.memory import MIB, CacheBudget, decide_cache
from vexpert.engine.scheduler import Scheduler
from vexpert.errors import ConfigError
from vexpert.log import get_logger
from vexpert.lora.watched_folder import check_lora_dir
from vexpert.models.types import ModelInfo, ServedModel

logger = get_logger(__name__)

GRAPH_BYTES = 16 * MIB  # that one captured graph takes on the device, roughly


def load_served_model(config: EngineConfig) -> ServedModel:
    """The model that `config` names, with its weights on the device."""
    from vexpert.models.loader import load_model

    model: ServedModel = load_model(config)
    return model


def load_model_tokenizer(config: EngineConfig) -> Any:
    """The tokenizer of the model, or the one `config` names instead."""
    from vexpert.models.loader import load_tokenizer

    return load_tokenizer(config)


def check_lora_options(config: EngineConfig) -> dict[str, float]:
    """The shares by tenant. ConfigError for what would be refused once the model is loaded."""
    check_lora_dir(config)
    return parse_weights(config.lora_weights)


def make_adapters(config: EngineConfig, model: ServedModel) -> AdapterSource:
    """The adapter manager of `model`; allocates the arena of the slots."""
    if not config.enable_lora:
        return NoAdapters()
    from vexpert.lora.build_extras import SUPPORTED
    from vexpert.lora.extras import NOTHING
    from vexpert.lora.manager import AdapterManager
    from vexpert.lora.reader import read_adapter

    info, weight = model.info, model.parameter
    reader = functools.partial(
        read_adapter,
        # Extras are applied site by site, by products of their own.
        supported=NOTHING if config.batch_invariant else SUPPORTED,
        base_weight=weight,
        model_names=model_names(info.name),
    )
    manager = AdapterManager(
        *(model.targets, model.lora, config, info.device, info.dtype, reader),
        reserved=_base_names(config, info),
        base_weight=weight,
    )
    if config.lora_dir is not None:
        manager.watch(config.lora_dir, config.lora_dir_interval)
    source: AdapterSource = manager
    return source


def model_names(name: str) -> tuple[str, ...]:
    """Names of the model `name`, a folder or a hub's name: its own, and what its config says."""
    from vexpert.models.checkpoint import original_name

    if is_demo(name):
        return name, DEMO_NAME
    original = original_name(name)
    return (name, original) if original else (name,)


def _base_names(config: EngineConfig, info: ModelInfo) -> frozenset[str]:
    """The names that mean the base model."""
    own = {info.name, DEMO_NAME} if is_demo(config.model) else {info.name}
    return frozenset({*own, *config.reserved_names})


def make_graphs(
    config: EngineConfig,
    model: ServedModel,
    adapters: AdapterSource,
    max_model_len: int,
    capturer: Capturer | None = None,
) -> DecodeGraphs | None:
    """Graphs of decode steps, none of them captured yet; None, the reason logged: there are none.

    `capturer`: CUDA's unless given.
    """
    info = model.info
    if info.device.type != "cuda" and capturer is None:
        return None
    reason = "enforce_eager is set" if config.enforce_eager else model.why_not_captured()
    if reason is not None:
        logger.info("no CUDA graphs, decode steps run eagerly: %s", reason)
        return None
    sizes = graph_sizes(min(config.max_num_seqs, config.tokens_per_step(info.device.type)))
    width = -(-max_model_len // config.block_size)
    buffers = GraphBuffers(info, sizes[-1], width, config.block_size)
    return DecodeGraphs(model, adapters, buffers, sizes, capturer or CudaCapturer(info.device))


def graph_reserve(graphs: DecodeGraphs | None, config: EngineConfig) -> int:
    """Bytes of the device to keep free for `graphs`, logged."""
    if graphs is None:
        return 0
    count = len(graphs.sizes) + (MOST_LORA_GRAPHS if config.enable_lora else 0)
    logger.info("CUDA graphs: %.1f MiB reserved for up to %d", count * GRAPH_BYTES / MIB, count)
    return count * GRAPH_BYTES


def make_cache(
    config: EngineConfig, model: ServedModel, max_model_len: int, reserved: int
) -> CacheBudget:
    """The KV cache of `model`, allocated; `reserved`: bytes of the device to leave free."""
    cache = decide_cache(config, model.info, max_model_len, reserved)
    size = cache.num_blocks * cache.block_bytes
    with allocating(
        f"a KV cache of {size} bytes ({cache.reason})",
        "lower kv_cache_memory, gpu_memory_utilization or max_num_seqs",
    ):
        model.allocate_cache(cache.num_blocks, config.block_size)
    return cache


def make_scheduler(
    config: EngineConfig,
    adapters: AdapterSource,
    num_blocks: int,
    tokens_per_step: int,
    weights: dict[str, float],
) -> Scheduler:
    """The scheduler of `num_blocks` blocks; `weights`: the shares by tenant."""
    return Scheduler(
        BlockPool(num_blocks, config.block_size),
        adapters,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=tokens_per_step,
        enable_prefix_caching=config.enable_prefix_caching,
        max_requests_per_lora=config.max_requests_per_lora,
        weights=weights,
    )


def decide_max_model_len(config: EngineConfig, info: ModelInfo) -> int:
    """Longest prompt plus output in tokens; ConfigError if the model cannot reach it."""
    if config.max_model_len is None:
        return info.max_model_len
    if not 2 <= config.max_model_len <= info.max_model_len:
        raise ConfigError(
            f"max_model_len={config.max_model_len}: use 2 to {info.max_model_len},"
            f" the longest that {info.name} can do"
        )
    return config.max_model_len


def log_budgets(
    model: ServedModel,
    config: EngineConfig,
    cache: CacheBudget,
    length: int,
    adapters: AdapterSource,
) -> None:
    """Log what the engine keeps in memory."""
    info = model.info
    logger.info(
        "model %s (%s): %.1f MiB of weights, %s on %s, max_model_len=%d",
        *(info.name, info.model_type, info.weight_bytes / MIB, info.dtype, info.device, length),
    )
    tokens = cache.num_blocks * config.block_size
    logger.info(
        "KV cache: %.1f MiB (%s), %d blocks of %d tokens: %d tokens, %.1f full-length sequences",
        *(cache.num_blocks * cache.block_bytes / MIB, cache.reason, cache.num_blocks),
        *(config.block_size, tokens, tokens / length),
    )
    if config.enable_lora:
        usage = adapters.usage()
        logger.info(
            "adapters: %.1f MiB on the device in at most %d slots, %.1f MiB on the host",
            *(usage.device_bytes / MIB, adapters.num_slots, usage.host_bytes / MIB),
        )
    if info.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(info.device)
        logger.info("device memory: %.1f of %.1f MiB in use", (total - free) / MIB, total / MIB)
