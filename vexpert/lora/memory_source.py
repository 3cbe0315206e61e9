"""An adapter that comes as tensors, from a trainer in this process, instead of as files."""

import json
import numbers
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from vexpert.config import shown
from vexpert.errors import AdapterError
from vexpert.lora.files import Tensors, check_tensors
from vexpert.lora.pattern_tables import ORDER


@dataclass(frozen=True)
class AdapterTensors:
    """What the two files of an adapter folder hold; keys as in adapter_model.safetensors."""

    config: dict[str, Any]
    tensors: Tensors

    def __str__(self) -> str:
        return "from memory"

    def checked(self) -> Tensors:
        """The tensors on the host, held to what a file's tensors are held to."""
        check_tensors(str(self), self.tensors)
        plain = {key: x.detach().to("cpu") for key, x in self.tensors.items()}
        # The negative bit of a view is nowhere but in PyTorch.
        return {key: x.resolve_neg().contiguous() for key, x in plain.items()}


def adapter_tensors(tensors: Any, config: Any) -> AdapterTensors:
    """Checked arguments of a load from memory. AdapterError says what they must be.

    `config`: the fields of adapter_config.json, or an object with `to_dict`, such as PEFT's.
    """
    if not isinstance(tensors, Mapping):
        raise AdapterError(f"tensors={shown(tensors)}: give a dict of name: torch.Tensor")
    for key, tensor in tensors.items():
        _check_kind(key, tensor)
        _check_dense(key, tensor)
    fields = config.to_dict() if hasattr(config, "to_dict") else config
    if not isinstance(fields, Mapping):
        raise AdapterError(
            f"config={shown(config)}: give the fields of adapter_config.json as a dict"
        )
    if hasattr(config, "to_dict"):
        fields = {ORDER: "trainer", **fields}  # an object, unlike a file, has kept its order
    return AdapterTensors(_plain(fields), dict(tensors))


def _check_kind(key: Any, tensor: Any) -> None:
    """AdapterError for an entry that is not name: torch.Tensor."""
    if not isinstance(key, str):
        raise AdapterError(
            f"tensors has the key {shown(key)}, of type {type(key).__name__}: use names, as in "
            "adapter_model.safetensors"
        )
    if not isinstance(tensor, torch.Tensor):
        kind = type(tensor).__name__
        raise AdapterError(f"tensors[{shown(key)}] is of type {kind}: give a torch.Tensor")


def _check_dense(key: str, tensor: torch.Tensor) -> None:
    """AdapterError for a tensor that does not lie in memory as plain numbers."""
    if tensor.device.type == "meta":
        kind, remedy = "on the meta device", "give one with values, not on the meta device"
    elif tensor.is_quantized:
        kind, remedy = f"quantized ({tensor.dtype})", "give its dequantize()"
    elif tensor.is_nested or tensor.layout is not torch.strided:
        layout = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
        kind, remedy = f"a tensor of layout {layout}", "give its to_dense(), or padded rows"
    elif not _has_memory(tensor):
        name = type(tensor).__name__
        kind = f"a {name} without memory of its own"
        remedy = "give the plain tensor in it, outside of vmap, grad and fake modes"
    else:
        return
    raise AdapterError(f"tensors[{shown(key)}] is {kind}, with no plain numbers: {remedy}")


def _has_memory(tensor: torch.Tensor) -> bool:
    """False for tensors that stand for others: fake ones, wrappers, those amid a transform."""
    try:
        storage = tensor.untyped_storage()
        # In this order: a fake tensor's storage warns when it is asked for its place.
        return storage.device == tensor.device and (storage.data_ptr() != 0 or not tensor.numel())
    except (RuntimeError, NotImplementedError):  # "Cannot access storage of ..."
        return False


def _plain(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields as JSON would hold them: PEFT's own config has sets and enums."""
    try:
        plain: dict[str, Any] = json.loads(json.dumps(dict(fields), default=_as_json))
    except (TypeError, ValueError, OverflowError) as error:
        raise AdapterError(f"config cannot be written as JSON: {error}") from None
    return plain


def _as_json(value: Any) -> Any:
    """A set as a list, numpy's numbers as Python's, anything else as text."""
    match value:
        case set() | frozenset():
            return sorted(value)
        case np.bool_():
            return bool(value)
        case numbers.Integral():
            return int(value)
        case numbers.Real():
            return float(value)
    return str(value)
