"""Engine options: one frozen dataclass, used by Python callers and by the command line alike.

Field metadata drives the command line and the checks, of the server's options too. A bool becomes
`--name / --no-name`; an underscore becomes a dash.
"""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import NoneType
from typing import Any, get_args, get_origin

from vexpert.errors import ConfigError, nearest

DTYPES = ("auto", "float32", "bfloat16", "float16")


def shown(value: object, longest: int = 100) -> str:
    """A user's value for a message: its repr, cut when long."""
    try:
        text = repr(value)
    except ValueError:  # an integer of more digits than Python prints
        text = f"a very large {type(value).__name__}"
    return cut(text, longest)


def cut(text: str, longest: int) -> str:
    """The beginning of a long text, for a message."""
    return text if len(text) <= longest else f"{text[:longest]}..."


def printable(text: str) -> str:
    """A name from a file for a message that shows it without quotes: no newlines, no escapes."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def first_line(error: Exception) -> str:
    """What went wrong, without the lines that libraries add."""
    return (str(error) or type(error).__name__).splitlines()[0]


def option(
    default: Any,
    help: str,
    group: str | None,
    choices: tuple[str, ...] | None = None,
    **more: Any,
) -> Any:
    """A dataclass field that the command line can show; without a `group` it does not.

    More: `bounds`, the least and the largest number; `may_be_empty`, whether an empty text says
    something; `secret`, whether no message may show it (its texts are checked elsewhere); `flag`,
    where it is not the field's name; `metavar`; `switch`, the value that the flag alone sets.
    """
    metadata = {"help": help, "group": group, "choices": choices, **more}
    assert more.keys() <= {"bounds", "may_be_empty", "secret", "flag", "metavar", "switch"}
    return field(default=default, metadata=metadata)


def check_options(options: Any) -> None:
    """Raise ConfigError for a dataclass's field of another type, or not as its `option` says."""
    for spec in dataclasses.fields(options):
        value, more = getattr(options, spec.name), spec.metadata
        told = f"{spec.name}={'(not shown)' if more.get('secret') else shown(value)}"
        _check_type(told, value, spec.type)
        if value is None:
            continue
        if (choices := more.get("choices")) and value not in choices:
            raise ConfigError(f"{told}: use one of {', '.join(choices)}")
        if (bounds := more.get("bounds")) and not bounds[0] <= value <= bounds[1]:
            kind = "an integer" if isinstance(bounds[0], int) else "a number"
            raise ConfigError(f"{told}: use {kind} from {bounds[0]} to {bounds[1]}")
        if not (more.get("may_be_empty") or more.get("secret")):
            _check_texts(told, value)


def _check_texts(told: str, value: object) -> None:
    """Raise ConfigError for a text, or one of several, that says nothing or that no file has."""
    for text in value if isinstance(value, tuple) else (value,):
        if isinstance(text, str) and not text.strip():
            raise ConfigError(f"{told}: is empty; give a text, or leave the option out")
        if isinstance(text, str) and "\0" in text:
            raise ConfigError(f"{told}: has a zero character in it; leave that out")


def _check_type(told: str, value: object, kind: Any) -> None:
    if get_origin(kind) is tuple:
        if not isinstance(value, tuple) or not all(isinstance(each, str) for each in value):
            raise ConfigError(f"{told}: must be a tuple of str")
        return
    kinds = (dict,) if get_origin(kind) is dict else get_args(kind) or (kind,)
    if isinstance(value, bool):
        ok = bool in kinds
    else:
        ok = isinstance(value, kinds) or (float in kinds and isinstance(value, int))
    if not ok:
        wanted = " or ".join("None" if each is NoneType else each.__name__ for each in kinds)
        raise ConfigError(f"{told}: must be {wanted}")


@contextmanager
def allocating(what: str, remedy: str) -> Iterator[None]:
    """Turns an allocator's failure inside the block into a ConfigError that names the option."""
    try:
        yield
    except (RuntimeError, MemoryError, OverflowError) as error:
        cause = first_line(error)
        raise ConfigError(f"{what} cannot be allocated: {remedy} ({cause})") from error


# On a GPU a step of some thousand tokens costs the host what a step of few costs.
TOKENS_PER_STEP = {"cpu": 2048, "cuda": 8192}
# Bounds of numbers, both included.
COUNT = (1, 2**31 - 1)
COUNT_OR_NONE = (0, 2**31 - 1)
BYTES = (0, 2**63 - 1)


@dataclass(frozen=True)
class EngineConfig:
    """Everything that shapes an engine. Bytes are integers; `None` means: decided at boot."""

    model: str = option(
        "", "folder or Hugging Face name; empty: the bundled demo model", "model", may_be_empty=True
    )
    tokenizer: str | None = option(None, "folder or name, if not the model's own", "model")
    dtype: str = option(
        "auto", "weights and activations; auto: as the checkpoint says", "model", DTYPES
    )
    device: str = option("auto", "auto, cpu, cuda or cuda:N", "model")
    load_format: str = option(
        "auto", "dummy: random weights", "model", ("auto", "safetensors", "dummy")
    )
    seed: int = option(
        0,
        "seed of the sampler's default generator and of dummy weights",
        "model",
        bounds=(-(2**63), 2**64 - 1),
    )
    max_model_len: int | None = option(
        None, "longest prompt plus output, in tokens", "model", bounds=COUNT
    )
    tensor_parallel_size: int = option(1, "devices; only 1 for now", "model", bounds=COUNT)
    trust_remote_code: bool = option(False, "run Python code that a checkpoint ships", "model")
    block_size: int = option(16, "tokens per KV block", "cache", bounds=COUNT)
    kv_cache_memory: int | None = option(
        None, "bytes for the KV cache; default: from free memory", "cache", bounds=BYTES
    )
    gpu_memory_utilization: float = option(
        0.9, "share of device memory to use in all", "cache", bounds=(0.0, 1.0)
    )
    enable_prefix_caching: bool = option(
        True, "reuse KV blocks of equal prefixes of one adapter", "cache"
    )
    max_num_seqs: int = option(256, "requests in one step", "scheduler", bounds=COUNT)
    max_num_batched_tokens: int | None = option(
        None, "tokens in one step; default: 8192 on a GPU, 2048 on a CPU", "scheduler", bounds=COUNT
    )
    enforce_eager: bool = option(False, "no CUDA graphs", "scheduler")
    warm_up: str = option(
        "all",
        "what a GPU compiles before it is ready: all kernels; those of decode steps; none but for"
        " its graphs. The rest comes with the requests that need it",
        "scheduler",
        ("all", "decode", "none"),
    )
    kernel_plans: str | None = option(
        None, "file of vexpert bench tune: its kernel plans before the packaged ones", "scheduler"
    )
    batch_invariant: bool = option(
        False,
        "answers equal bit for bit whatever else is in the batch; GPU only, slower",
        "scheduler",
    )
    enable_lora: bool = option(True, "serve adapters", "lora")
    max_loras: int | None = option(
        None,
        "most adapters on the device; default: as many as lora_memory holds",
        "lora",
        bounds=COUNT,
    )
    max_lora_rank: int = option(64, "largest rank accepted", "lora", bounds=COUNT)
    max_cpu_loras: int | None = option(
        None,
        "most adapters in host memory; default: as many as lora_host_memory holds",
        "lora",
        bounds=COUNT_OR_NONE,
    )
    lora_memory: int | None = option(
        None, "bytes for adapters on the device; default: 20% of free memory", "lora", bounds=BYTES
    )
    lora_host_memory: int | None = option(
        None, "bytes for adapters in host memory; default: 20% of free memory", "lora", bounds=BYTES
    )
    lora_readers: int | None = option(
        None,
        "processes that read adapters; 0: threads; default: 2 before a GPU, else 0",
        "lora",
        bounds=(0, 64),
    )
    lora_dir: str | None = option(
        None, "folder of adapters: each folder in it is a name, read at its first use", "lora"
    )
    lora_dir_interval: float = option(
        2.0, "seconds between two looks at lora_dir", "lora", bounds=(0.05, 86_400)
    )
    max_requests_per_lora: int | None = option(
        None, "most running completions of one adapter", "lora", bounds=COUNT
    )
    lora_weights: str | None = option(
        None, 'shares of tenants, the part of a name before "/", as JSON: {"team": 2}', "lora"
    )
    allowed_adapter_roots: tuple[str, ...] = option(
        (), "folders: an adapter below one of them may have no file, links followed, outside", None
    )
    reserved_names: tuple[str, ...] = option(
        (), "further names of the base model, which no adapter may take", None
    )
    lora_use_virtual_experts: bool = option(True, "one grouped product for all adapters", "lora")
    lora_backend: str = option(
        "auto", "operations that run LoRA and experts", "lora", ("auto", "torch", "numba", "triton")
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.tensor_parallel_size != 1:
            value = shown(self.tensor_parallel_size)
            raise ConfigError(f"tensor_parallel_size={value}: one device only for now; use 1")
        if self.batch_invariant and not self.lora_use_virtual_experts:
            raise ConfigError(
                "batch_invariant=True needs lora_use_virtual_experts: the path of one adapter after"
                " another has products of its own"
            )
        if self.gpu_memory_utilization == 0:
            raise ConfigError("gpu_memory_utilization=0: use a number above 0, at most 1")

    def tokens_per_step(self, device_type: str) -> int:
        """max_num_batched_tokens, or what is best on a device "cuda" or "cpu"."""
        if self.max_num_batched_tokens is not None:
            return self.max_num_batched_tokens
        return TOKENS_PER_STEP.get(device_type, TOKENS_PER_STEP["cpu"])

    @classmethod
    def from_options(cls, **options: Any) -> "EngineConfig":
        """Build a config from keyword options; an unknown name is a ConfigError."""
        known = [spec.name for spec in dataclasses.fields(cls)]
        for name in options:
            if name not in known:
                near = nearest(name, known)
                hint = f"; did you mean {near!r}?" if near else f"; known: {', '.join(known)}"
                raise ConfigError(f"unknown engine option {name!r}{hint}")
        return cls(**options)
