"""Messages between the server and its engine: msgpack arrays, the first item names the kind.

To the engine:
    add      call, key, request_id, prompt, token_ids, params, adapter, version, every_step
    abort    key
    call     call, method, arguments        a method of EngineLoop.METHODS
    beat                                    asks for a `beat`
    stop
From it:
    ready    facts                          once
    refused  error                          in place of `ready`
    failed   reason                         the engine ends
    reply    call, error or None, value
    beat     turns, is_idle                 of the thread that steps
    step     entries                        of all requests that gained something in this step

`key` and `call` are integers of the server's choice. An entry is what `Progress.entry` makes. The
stream needs no frames: msgpack says where a message ends.
"""

import dataclasses
import json
import socket
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any, cast

import msgpack

from vexpert import errors
from vexpert.engine.outputs import EngineStats, Logprob, LogprobRow
from vexpert.engine.sampling_params import SamplingParams
from vexpert.engine.structured_outputs import StructuredOutputs
from vexpert.errors import RequestError, VexpertError
from vexpert.lora.info import AdapterInfo, TierUsage
from vexpert.server.progress import EngineCallError, OverloadedError

Message = list[Any]
SURROGATES = "surrogatepass"  # a client's JSON may hold halves of characters
READ_BYTES = 2**18  # at once
BOOT_BEAT = 2.0  # seconds between two questions to an engine that starts
MAX_BYTES = 2**31 - 1  # of one message


def pack(*message: Any) -> bytes:
    """One message as bytes."""
    return cast(bytes, msgpack.packb(message, unicode_errors=SURROGATES))


def new_unpacker() -> Any:
    """Yields each message that the bytes it was fed complete."""
    return msgpack.Unpacker(
        unicode_errors=SURROGATES, strict_map_key=False, max_buffer_size=MAX_BYTES
    )


def first_message(sock: socket.socket, silence: float | None = None) -> Message | None:
    """The engine sends one message and waits; None: it ends without a word.

    It is asked for beats meanwhile. Raises TimeoutError where none comes for `silence` seconds.
    """
    unpacker, first, asked, silent = new_unpacker(), None, 0, 0.0
    sock.settimeout(silence and min(BOOT_BEAT, silence / 4))
    # No more may come afterwards: what was read of it would be lost.
    while first is None or asked:
        try:
            data = sock.recv(READ_BYTES)
        except TimeoutError:
            silent += sock.gettimeout() or 0.0
            if silence is not None and silent >= silence:
                raise
            sock.sendall(pack("beat"))
            asked += 1
            continue
        except ConnectionError:
            data = b""
        if not data:
            break
        silent = 0.0
        unpacker.feed(data)
        for message in unpacker:
            asked -= message[0] == "beat"
            first = first if message[0] == "beat" else message
    sock.settimeout(None)
    return first


# Errors: (class, message, field of the request or None).

_ERRORS: dict[str, type[Exception]] = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, VexpertError)
} | {"OverloadedError": OverloadedError}


def error_fields(error: Exception) -> tuple[str, str, str | None]:
    """An error as it travels."""
    names = (kind.__name__ for kind in type(error).__mro__)
    known = next((name for name in names if name in _ERRORS or name == "OSError"), None)
    param = error.param if isinstance(error, RequestError) else None
    return known or f"?{type(error).__name__}", str(error), param


def read_error(fields: tuple[str, str, str | None]) -> Exception:
    """The error again; EngineCallError for one that no user can cause."""
    name, message, param = fields
    if name == "OSError":
        return OSError(message)
    kind = _ERRORS.get(name)
    if kind is None:
        return EngineCallError(name.removeprefix("?"), message)
    return RequestError(message, param) if kind is RequestError else kind(message)


# Sampling options: the fields that are not the defaults.

_DEFAULTS = SamplingParams()
_PARAMS = tuple(spec.name for spec in dataclasses.fields(SamplingParams))
_DOCUMENTS = ("json", "structural_tag")


def params_fields(params: SamplingParams) -> dict[str, Any]:
    """Sampling options as they travel."""
    found = {
        name: value
        for name in _PARAMS
        if (value := getattr(params, name)) != getattr(_DEFAULTS, name)
    }
    if params.constraint is not None:
        found["structured_outputs"] = _constraint_fields(params.constraint)
    return found


def _constraint_fields(wanted: StructuredOutputs) -> dict[str, Any]:
    """Its documents go as text: numbers in them may be larger than msgpack's."""
    found = dict(vars(wanted))
    for name in _DOCUMENTS:
        if isinstance(found[name], Mapping):
            found[name] = json.dumps(found[name], ensure_ascii=False)
    return found


def read_params(fields: dict[str, Any]) -> SamplingParams:
    """The sampling options again. A constraint was checked where it came from."""
    constraint = fields.pop("structured_outputs", None)
    if constraint is None:
        return SamplingParams(**fields)
    wanted = object.__new__(StructuredOutputs)
    for name, value in constraint.items():
        object.__setattr__(wanted, name, value)
    return SamplingParams(**fields, structured_outputs=wanted)


# Log-probabilities: (token, logarithm, rank, text) of each entry of a row.

_OF_ENTRY: Callable[[Logprob], tuple[float, int, str]] = attrgetter(
    "logprob", "rank", "decoded_token"
)


def row_fields(row: LogprobRow | None) -> list[tuple[Any, ...]] | None:
    """One position's log-probabilities as they travel, in their order."""
    if row is None:
        return None
    return [(token, *_OF_ENTRY(entry)) for token, entry in row.items()]


def read_row(fields: list[list[Any]] | None) -> LogprobRow | None:
    """One position's log-probabilities again."""
    return None if fields is None else {entry[0]: Logprob(*entry[1:]) for entry in fields}


# Adapters and statistics.

_INFO = tuple(spec.name for spec in dataclasses.fields(AdapterInfo))
_OF_INFO = attrgetter(*_INFO)


def info_fields(info: AdapterInfo) -> tuple[Any, ...]:
    """An adapter's line as it travels."""
    fields: tuple[Any, ...] = _OF_INFO(info)
    return fields


def read_info(fields: list[Any]) -> AdapterInfo:
    """An adapter's line again."""
    named = dict(zip(_INFO, fields, strict=True))
    return AdapterInfo(**(named | {"warnings": tuple(named["warnings"])}))


def stats_fields(stats: EngineStats) -> dict[str, Any]:
    """Statistics as they travel."""
    return vars(stats) | {"adapters": vars(stats.adapters)}


def read_stats(fields: dict[str, Any]) -> EngineStats:
    """Statistics again."""
    names = {name: tuple(fields[name]) for name in ("running_adapters", "waiting_adapters")}
    return EngineStats(**(fields | names | {"adapters": TierUsage(**fields["adapters"])}))
