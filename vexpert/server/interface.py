"""What the server needs of an engine, of the place it runs in, and of its tokenizer."""

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from vexpert.lora.info import AdapterPage, ListedNames

if TYPE_CHECKING:
    from vexpert.config import EngineConfig
    from vexpert.engine.outputs import EngineStats, RequestOutput
    from vexpert.engine.sampling_params import SamplingParams
    from vexpert.lora.chat_template import ChatTemplate
    from vexpert.lora.info import AdapterInfo
    from vexpert.models.types import ModelInfo


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that the server uses."""

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any:
        """Text of a conversation, with `tokenize=False`."""

    def encode(self, text: Any, *, add_special_tokens: bool = True) -> Any:
        """Token ids of `text`."""

    def decode(self, token_ids: Any, **options: Any) -> Any:
        """Text of `token_ids`, with `skip_special_tokens` or without."""


class AdapterListing(Protocol):
    """All adapters of an engine, in parts; any thread. See `vexpert.lora.listing`."""

    def page(
        self, after: str | None, most: int, states: frozenset[str] = frozenset(), part: str = ""
    ) -> AdapterPage:
        """The first `most` names behind `after`, or fewer; `states`: none are any."""

    def named(self, names: Sequence[str]) -> "Sequence[AdapterInfo]":
        """All versions of `names`."""

    def some_names(self, most: int) -> ListedNames:
        """The first `most` names that requests may use."""


class EngineProtocol(Protocol):
    """An engine. Only the calls about adapters, `is_quick` and `prepare` may run beside `step`."""

    config: "EngineConfig"
    max_model_len: int  # tokens of prompt and output together

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer, see `Tokenizer`."""

    @property
    def model_info(self) -> "ModelInfo":
        """Facts of the loaded model."""

    def is_quick(self, params: "SamplingParams") -> bool:
        """Whether `prepare` needs no trial that may take long."""

    def prepare(self, params: "SamplingParams", is_wanted: Callable[[], bool]) -> None:
        """Compile what `params` constrain the output to. Raises RequestError.

        Also soon after `is_wanted` says no.
        """

    def adapter_folder(self, name: str) -> str | None:
        """Folder of the newest version of an adapter; None if there is none."""

    def adapter_template(self, name: str, may_read: bool = True) -> "ChatTemplate | None":
        """The chat template that an adapter was loaded with; None: it must be read first.

        It tells its version, which is 0 for an unknown adapter.
        """

    def add_request(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: "SamplingParams",
        adapter: str | None = None,
        version: int | None = None,
    ) -> None:
        """Queue a request. Raises RequestError or AdapterNotFoundError.

        AdapterReplacedError where `version` is given, and is not the adapter's newest.
        """

    def abort(self, request_id: str) -> bool:
        """Drop a request and free what it holds; False if it is unknown or finished."""

    def step(self) -> "list[RequestOutput]":
        """Run one step; the outputs of requests that gained tokens, cumulative.

        Waits a moment itself when nothing can run.
        """

    def has_unfinished(self) -> bool:
        """Whether any request waits or runs."""

    def load_adapter(self, name: str, path: str, **options: Any) -> "AdapterInfo":
        """Load an adapter and wait for it. Raises AdapterError.

        Options: lora_B_layout, load_inplace, pinned.
        """

    def register_adapter(self, name: str, path: str, **options: Any) -> "AdapterInfo":
        """The same, to be read when it is first needed."""

    def unload_adapter(self, name: str, *, drain_seconds: float | None = None) -> None:
        """Unload an adapter. Raises AdapterNotFoundError."""

    def adapters(self) -> "list[AdapterInfo]":
        """All known adapters; for the boot: of thousands it takes a while."""

    @property
    def adapter_listing(self) -> AdapterListing:
        """The same in parts."""

    def stats(self) -> "EngineStats":
        """One look at the engine."""

    def check_integrity(self) -> None:
        """Assert that everything the engine keeps agrees; between two steps."""


@dataclass(frozen=True)
class LoraModule:
    """An adapter to serve from the boot on."""

    name: str
    path: str
    lora_B_layout: str | None = None
    pinned: bool = False
    lazy: bool = False  # read when a request first needs it


@dataclass(frozen=True)
class EngineFacts:
    """What does not change while an engine lives."""

    model: str  # folder or Hugging Face name, as the config has it
    name: str  # of the model
    vocab_size: int
    max_model_len: int  # tokens of prompt and output together
    max_num_seqs: int
    adapters: tuple[str, ...]  # usable names when the engine was ready


class EngineHost(Protocol):
    """Where an engine runs: a process of its own, or a thread in tests.

    Both speak the messages of `vexpert.server.wire` over a socket.
    """

    @property
    def modules(self) -> Sequence[LoraModule]:
        """Adapters that it was launched with."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer, in this process."""

    @property
    def facts(self) -> EngineFacts:
        """Of the engine that `connect` found ready."""

    def launch(self, modules: Sequence[LoraModule], is_restart: bool = False) -> None:
        """Start an engine that serves `modules`; in a restart one that is refused is left out."""

    def connect(self) -> socket.socket:
        """The server's end of the socket, once the engine is ready; the same until `launch`.

        Raises the VexpertError that the engine refused to start with, or EngineFailedError.
        """

    def wait(self) -> str:
        """Wait until the engine has ended; how it did."""

    def kill(self) -> None:
        """End the engine at once, whatever it does; harmless when it has ended."""
