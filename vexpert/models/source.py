"""Where a model comes from, checked in moments: before anything heavy is imported or started."""

import json
import os
from pathlib import Path
from typing import Any

from vexpert.config import EngineConfig, shown
from vexpert.demo import find_model
from vexpert.errors import ConfigError, ModelError

PATH_PREFIXES = ("/", "./", "../", "~")  # no Hugging Face name starts so
HUB_SECONDS = 5.0
REMEDY = "give a folder with config.json and safetensors, or a Hugging Face name"


def model_source(config: EngineConfig) -> str:
    """Folder or Hugging Face name of the model; "" and the demo's name mean the bundled demo."""
    return find_model(config.model)


def check_model(config: EngineConfig) -> None:
    """Raise ModelError or ConfigError for what would be refused once the engine has started."""
    source = model_source(config)
    check_source(source)
    if config.max_model_len is not None and not config.trust_remote_code:
        limit = _positions(Path(source))
        if limit is not None and config.max_model_len > limit:
            raise ConfigError(
                f"max_model_len={config.max_model_len}: use 2 to {limit},"
                f" the longest that {source} can do"
            )


def check_source(source: str) -> None:
    """ModelError for a path without a folder, an adapter's folder, a name that nobody knows.

    A name is looked up in the local cache of the hub, then once on the hub itself, which has
    HUB_SECONDS to answer.
    """
    folder = Path(source)
    if folder.is_dir():
        if (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
            raise ModelError(
                f"model {source!r}: this is an adapter, not a model: serve its base model with "
                "--lora-modules NAME=PATH"
            )
        return
    if source.startswith(PATH_PREFIXES) or os.path.isabs(source):
        more = "write ~ out in full, or " if source.startswith("~") else ""
        raise ModelError(f"model {source!r}: the folder does not exist; {more}{REMEDY}")
    _check_name(source)


def _check_name(name: str) -> None:
    """Import huggingface_hub, which takes 0.2 s."""
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(name, "config.json")
    except HFValidationError as error:
        raise ModelError(
            f"model {shown(name)}: no such folder, and no Hugging Face name either; {REMEDY}"
        ) from error
    if isinstance(cached, str):
        return
    unknown = f"model {name!r}: no such folder, not in the local cache of the hub, and"
    if constants.HF_HUB_OFFLINE:
        raise ModelError(f"{unknown} HF_HUB_OFFLINE is set: {REMEDY}")
    if (reason := _hub_refusal(constants.ENDPOINT, name)) is not None:
        raise ModelError(f"{unknown} {reason}; {REMEDY}")


def _hub_refusal(endpoint: str, name: str) -> str | None:
    """Ask the hub once; why it does not have the model, or None where it may."""
    import ssl
    from urllib.error import HTTPError
    from urllib.request import Request, urlopen

    from huggingface_hub import get_token

    request = Request(f"{endpoint}/api/models/{name}")
    if token := get_token():
        request.add_unredirected_header("Authorization", f"Bearer {token}")
    try:
        urlopen(request, timeout=HUB_SECONDS).close()
    except HTTPError as error:
        error.close()
        if error.code in (401, 403, 404):
            return f"{endpoint} has none of this name (a private one needs HF_TOKEN)"
    except OSError as error:
        # The hub's client has certificates of its own: it may well reach what this cannot.
        cause = getattr(error, "reason", error)
        if not isinstance(cause, ssl.SSLError):
            return f"{endpoint} is not reachable ({cause})"
    return None


def _positions(folder: Path) -> int | None:
    """max_position_embeddings of a checkpoint; None where it is not plain to see."""
    try:
        raw: Any = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # whoever loads the model says what is wrong
        return None
    text = raw.get("text_config", raw) if isinstance(raw, dict) else None
    limit = text.get("max_position_embeddings") if isinstance(text, dict) else None
    return limit if isinstance(limit, int) else None
