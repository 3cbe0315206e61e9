"""From a name or folder to a transformers model on the device, with its weights."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from vexpert.config import EngineConfig
from vexpert.errors import ConfigError, ModelError
from vexpert.log import get_logger
from vexpert.models.source import REMEDY, check_source, model_source

logger = get_logger(__name__)


def read_config(config: EngineConfig) -> Any:
    """The checkpoint's transformers config; ModelError if there is none that transformers knows."""
    source = model_source(config)
    check_source(source)
    try:
        return AutoConfig.from_pretrained(source, trust_remote_code=config.trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(
            f"model {source!r} has no config that transformers can read: {error}; {REMEDY}"
        ) from error


def original_name(source: str) -> str:
    """What the config of a model's folder says the model is called; "" where it does not."""
    path = Path(source) / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # a name and no folder; whoever loads it says what is wrong
        return ""
    name = raw.get("_name_or_path") if isinstance(raw, dict) else None
    return name if isinstance(name, str) else ""


def choose_device(name: str) -> torch.device:
    """`auto`: cuda if there is one, else cpu."""
    if name == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device={name!r}: use auto, cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device={name!r}: use auto, cpu, cuda or cuda:N")
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        raise ConfigError(
            f"device={name!r}: this machine has {count} CUDA devices; use cpu or auto"
        )
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


def choose_dtype(name: str, model_config: Any) -> torch.dtype:
    """`auto`: what the checkpoint's config says, else float32."""
    stated = model_config.dtype or getattr(model_config.get_text_config(), "dtype", None)
    dtype = (stated or torch.float32) if name == "auto" else name
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype)
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ModelError(f"weights in {dtype}: choose --dtype bfloat16, float16 or float32")
    assert isinstance(dtype, torch.dtype)
    return dtype


def build_model(
    config: EngineConfig, model_config: Any, dtype: torch.dtype, device: torch.device
) -> Any:
    """The transformers model in eval mode, without gradients, all weights on `device`."""
    if config.load_format == "dummy":
        model = _build_dummy(config, model_config, dtype, device)
    else:
        model = _load_weights(config, model_config, dtype, device)
    return model.requires_grad_(False).eval()


def _build_dummy(
    config: EngineConfig, model_config: Any, dtype: torch.dtype, device: torch.device
) -> Any:
    """Random weights from `config.seed`, made on the device; the caller's generators are kept."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), device:
        torch.manual_seed(config.seed)
        return AutoModelForCausalLM.from_config(
            model_config, dtype=dtype, trust_remote_code=config.trust_remote_code
        )


def _load_weights(
    config: EngineConfig, model_config: Any, dtype: torch.dtype, device: torch.device
) -> Any:
    source = model_source(config)
    options: dict[str, Any] = {"dtype": dtype, "use_safetensors": True, "config": model_config}
    if device.type != "cpu" and importlib.util.find_spec("accelerate"):
        options["device_map"] = {"": device}
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            source,
            trust_remote_code=config.trust_remote_code,
            output_loading_info=True,
            **options,
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelError(f"weights of {source!r} cannot be loaded: {error}") from error
    missing = sorted(report["missing_keys"])
    if missing:
        raise ModelError(
            f"{source!r} lacks {len(missing)} weights, such as {missing[0]!r}; a checkpoint must "
            "be complete"
        )
    return model.to(device)


def is_causal_lm(model_config: Any) -> bool:
    """Whether transformers has a causal language model for this config."""
    return type(model_config) in MODEL_FOR_CAUSAL_LM_MAPPING


def takes_text_config(model_config: Any) -> bool:
    """Whether that causal language model is made of the config's text part alone."""
    text = model_config.get_text_config()
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(model_config)]
    return text is model_config or isinstance(text, model_class.config_class)


def eos_token_ids(config: EngineConfig, model_config: Any) -> tuple[int, ...]:
    """End-of-text ids of generation_config.json, else of config.json; empty if neither has one."""
    found = model_config.get_text_config().eos_token_id
    try:
        generation = GenerationConfig.from_pretrained(model_source(config))
    except OSError:
        logger.debug("no generation_config.json: the end-of-text ids are those of config.json")
    else:
        found = found if generation.eos_token_id is None else generation.eos_token_id
    if found is None:
        return ()
    return (found,) if isinstance(found, int) else tuple(found)
