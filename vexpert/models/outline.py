"""What adapters may change in a model, from its config alone: no weight is read."""

from typing import NamedTuple

import torch
from transformers import AutoModelForCausalLM

from vexpert.config import EngineConfig
from vexpert.errors import ModelError
from vexpert.log import get_logger
from vexpert.lora.types import TargetMap
from vexpert.models.checkpoint import choose_dtype, read_config
from vexpert.models.loader import find_targets
from vexpert.models.source import model_source
from vexpert.models.support import check_supported

logger = get_logger(__name__)


class Outline(NamedTuple):
    """A model without its weights."""

    name: str
    targets: TargetMap
    dtype: torch.dtype


def read_outline(config: EngineConfig) -> Outline:
    """The outline of the model that `config` names; ModelError if it cannot be served."""
    model_config = read_config(config)
    check_supported(model_config)
    dtype = choose_dtype(config.dtype, model_config)
    text = model_config.get_text_config()

    def on(device: str) -> TargetMap:
        with torch.random.fork_rng(), torch.device(device):
            model = AutoModelForCausalLM.from_config(
                model_config, dtype=dtype, trust_remote_code=config.trust_remote_code
            )
        return find_targets(model, text, config.max_lora_rank)

    try:
        targets = on("meta")
    except ModelError as error:
        # Some models compute tables on the CPU while they run: they need memory to be observed.
        logger.debug("%s cannot be observed without memory: %s", model_source(config), error)
        targets = on("cpu")
    return Outline(model_source(config), targets, dtype)
