"""Sampling defaults that a model ships in generation_config.json."""

import json
from pathlib import Path
from typing import Any

from vexpert.engine.sampling_params import SamplingParams
from vexpert.errors import ModelError
from vexpert.log import get_logger

logger = get_logger(__name__)

HONOURED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def sampling_defaults(model: str) -> dict[str, Any]:
    """What requests get that do not say otherwise; empty without the file.

    `do_sample: false`, written out, means temperature 0. `model` is a folder or a Hugging Face
    name. Raises ModelError for a file that is no JSON object.
    """
    file = _find(model)
    if file is None:
        return {}
    try:
        content = json.loads(file.read_text())
    except json.JSONDecodeError as error:
        raise ModelError(f"{file}: not valid JSON ({error}); mend or remove it") from error
    if not isinstance(content, dict):
        raise ModelError(f"{file}: not a JSON object; mend or remove it")
    defaults = {name: content[name] for name in HONOURED if content.get(name) is not None}
    defaults |= {"temperature": 0.0} if content.get("do_sample") is False else {}
    SamplingParams(**defaults)  # refuses bad values now, not at every request
    return defaults


def _find(model: str) -> Path | None:
    if Path(model).is_dir():
        file = Path(model) / "generation_config.json"
        return file if file.is_file() else None
    from transformers.utils import cached_file

    name = "generation_config.json"
    try:
        found = cached_file(model, name, _raise_exceptions_for_missing_entries=False)
    except OSError as error:
        logger.warning("%s of %s is not at hand; OpenAI's defaults apply: %s", name, model, error)
        return None
    return Path(found) if found else None
