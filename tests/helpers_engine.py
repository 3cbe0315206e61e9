"""A model, a tokenizer and an adapter manager small enough to know every answer.

The model's KV entry of a token mixes the token, its position and the content of the adapter that
computed it. Logits hash all entries of the context, read through the block table, with the content
of the row's own adapter. A wrong block, slot, position or a stale entry changes every logit.
"""

import dataclasses
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from vexpert.config import EngineConfig
from vexpert.engine.capture import Capturer
from vexpert.engine.engine import Engine
from vexpert.engine.llm import LLM
from vexpert.engine.outputs import RequestOutput
from vexpert.engine.sampling_params import SamplingParams
from vexpert.errors import AdapterNameError, AdapterNotFoundError
from vexpert.lora.adapter_version import check_newest
from vexpert.lora.chat_template import ChatTemplate
from vexpert.lora.listing import Listing
from vexpert.lora.types import (
    AdapterInfo,
    AdapterRef,
    BatchView,
    LoraSignature,
    LoraState,
    TargetMap,
    TierUsage,
    Wait,
)
from vexpert.models.types import ModelInfo, StepInput

VOCAB = 64
EOS = 1
PRIME = 2_147_483_647
BYTES_PER_TOKEN = 8


@dataclass
class FakeManager:
    """Slots with least-recently-used eviction; the content of a slot is a number."""

    num_slots: int = 2
    current: dict[str, AdapterRef] = field(default_factory=dict)
    content: dict[AdapterRef, int] = field(default_factory=dict)
    holds: dict[AdapterRef, int] = field(default_factory=dict)
    pins: dict[AdapterRef, int] = field(default_factory=dict)
    in_slot: dict[int, AdapterRef] = field(default_factory=dict)  # oldest use first
    swaps: int = 0
    coming: set[AdapterRef] = field(default_factory=set)  # not read yet
    ended: dict[AdapterRef, str] = field(default_factory=dict)  # for the next `advance`
    prefetched: list[AdapterRef] = field(default_factory=list)  # of the last step

    def __post_init__(self) -> None:
        self._versions = itertools.count(1)
        self.listing = Listing(threading.RLock(), {})

    def load(
        self,
        name: str,
        path: str | None = None,
        *,
        load_inplace: bool = False,
        **options: Any,
    ) -> AdapterInfo:
        if name in self.current and not load_inplace:
            raise AdapterNameError(f"adapter {name!r} is already loaded")
        ref = AdapterRef(name, next(self._versions))
        self.current[name] = ref
        assert path is not None
        self.content[ref] = sum(path.encode()) * 7919 % PRIME + 1
        return AdapterInfo(name, ref.version, path, "host", 1, 1, 0, -1)

    def register(self, name: str, path: str, **options: Any) -> AdapterInfo:
        return self.load(name, path, **options)

    def unload(self, name: str, *, drain_seconds: float | None = None) -> None:
        self.resolve(name)
        del self.current[name]

    def chat_template(self, name: str, may_read: bool) -> ChatTemplate | None:
        self.resolve(name)
        return ChatTemplate()

    def usage(self) -> TierUsage:
        return TierUsage(known=len(self.current), device_adapters=len(self.in_slot))

    def advance(self, is_idle: bool = False) -> dict[AdapterRef, str]:
        ended, self.ended = self.ended, {}
        return ended

    def prefetch(self, refs: Iterable[AdapterRef]) -> None:
        self.prefetched = list(refs)

    def check_integrity(self) -> None:
        assert len(set(self.in_slot.values())) == len(self.in_slot)

    def list(self) -> list[AdapterInfo]:
        return [AdapterInfo(r.name, r.version, "", "host", 1, 1, 0, -1) for r in self.content]

    def resolve(self, name: str) -> AdapterRef:
        if name not in self.current:
            raise AdapterNotFoundError(f"no adapter {name!r}")
        return self.current[name]

    def hold(self, ref: AdapterRef) -> None:
        self.holds[ref] = self.holds.get(ref, 0) + 1

    def hold_newest(self, name: str, version: int | None = None) -> AdapterRef:
        ref = self.resolve(name)
        check_newest(ref, version)
        self.hold(ref)
        return ref

    def drop(self, ref: AdapterRef) -> None:
        assert self.holds[ref] > 0
        self.holds[ref] -= 1

    def acquire(self, ref: AdapterRef) -> int | Wait:
        assert self.holds.get(ref, 0) > 0, "acquired, but not held"
        if ref in self.coming:
            return Wait.COMING
        slot = next((s for s, r in self.in_slot.items() if r == ref), None)
        if slot is None:
            slot = self._free_slot()
            if slot is None:
                return Wait.NO_ROOM
            self.swaps += 1
        self.in_slot.pop(slot, None)
        self.in_slot[slot] = ref
        self.pins[ref] = self.pins.get(ref, 0) + 1
        return slot

    def _free_slot(self) -> int | None:
        for slot in range(self.num_slots):
            if slot not in self.in_slot:
                return slot
        return next((s for s, r in self.in_slot.items() if not self.pins.get(r)), None)

    def release(self, ref: AdapterRef) -> None:
        assert self.pins[ref] > 0, "released more often than acquired"
        self.pins[ref] -= 1

    def batch_view(
        self, slots: torch.Tensor, logit_slots: torch.Tensor, active: tuple[int, ...]
    ) -> BatchView | None:
        assert sorted({s for s in slots.tolist() if s >= 0}) == list(active)
        if not active:
            return None
        return BatchView(slots, logit_slots, active, True, LoraSignature((16,), len(active)))

    def slot_content(self, slot: int) -> int:
        """0 for the base model."""
        return 0 if slot < 0 else self.content[self.in_slot[slot]]

    def check_idle(self) -> None:
        assert not any(self.pins.values()), f"pinned: {self.pins}"
        assert not any(self.holds.values()), f"held: {self.holds}"


def on_host(step: StepInput) -> StepInput:
    """The same step with all tensors on the CPU, without the padding of a captured step."""
    assert step.query_starts is not None
    assert step.kv_lens is not None
    names = ["token_ids", "positions", "block_tables", "cache_rows", "logit_rows"]
    names += ["query_starts", "kv_lens"]
    view = step.lora
    if view is not None:
        slots, logit_slots = view.slots.cpu(), view.logit_slots.cpu()
        view = dataclasses.replace(view, slots=slots, logit_slots=logit_slots)
    tensors = {name: getattr(step, name).cpu() for name in names}
    return without_padding(dataclasses.replace(step, **tensors, lora=view))


def without_padding(step: StepInput) -> StepInput:
    """The rows in front, up to the first sequence without a query; checks that the rest is idle."""
    assert step.query_starts is not None
    assert step.kv_lens is not None
    query_lens = step.query_starts.diff().tolist()
    count = len(query_lens) - query_lens.count(0)
    if count == len(query_lens):
        return step
    assert set(query_lens[count:]) == {0}
    assert set(step.query_lens) == {1}
    assert (step.cache_rows[count:] == -1).all()
    assert not step.kv_lens[count:].any()
    view = step.lora
    if view is not None:
        assert (view.slots[count:] == -1).all()
        view = dataclasses.replace(view, slots=view.slots[:count], logit_slots=view.slots[:count])
    names = ("token_ids", "positions", "block_tables", "cache_rows", "logit_rows", "kv_lens")
    tensors = {name: getattr(step, name)[:count] for name in names}
    return dataclasses.replace(step, **tensors, lora=view, query_lens=(1,) * count)


class EagerCapturer:
    """A capture that calls its function: graphs of steps on their own tensors, without a GPU."""

    def __init__(self) -> None:
        self.captures = self.replays = 0

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        self.captures += 1
        run()

        def replay() -> None:
            self.replays += 1
            run()

        return replay


class FakeModel:
    """Implements ServedModel; `steps` keeps the inputs of all steps when `record` is set."""

    def __init__(
        self,
        manager: FakeManager,
        max_model_len: int = 64,
        vocab_size: int = VOCAB,
        device: str = "cpu",
    ) -> None:
        self.info = ModelInfo(
            name="fake",
            model_type="fake",
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            eos_token_ids=(EOS,),
            dtype=torch.float32,
            device=torch.device(device),
            weight_bytes=0,
            cache_bytes_per_token=BYTES_PER_TOKEN,
        )
        self.targets = TargetMap("fake", "FakeForCausalLM", {}, ())
        self.lora = LoraState()
        self.manager = manager
        self.record = False
        self.steps: list[StepInput] = []
        self._columns = np.arange(1, vocab_size + 1, dtype=np.int64) * 40_503

    def parameter(self, name: str) -> torch.Tensor | None:
        return None

    def allocate_cache(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        garbage = np.random.default_rng(0).integers(1, PRIME, num_blocks * block_size)
        self.cache = garbage  # [rows] int64

    def why_not_captured(self) -> str | None:
        return None if self.info.device.type == "cpu" else "it computes on the host"

    def forward(self, step: StepInput) -> torch.Tensor:
        if self.record:
            self.steps.append(step)
        return self.raw_logits(step)

    def raw_logits(self, step: StepInput) -> torch.Tensor:
        """Rows of padding are NaN."""
        size = len(step.logit_rows)
        step = on_host(step)
        assert step.kv_lens is not None
        step = dataclasses.replace(step, context_lens=tuple(step.kv_lens.tolist()))
        self._check(step)
        slots = np.full(len(step.token_ids), -1)
        if step.lora is not None:
            slots = step.lora.slots.numpy()
            assert (step.lora.logit_slots.numpy() == slots[step.logit_rows.numpy()]).all()
        contents = np.array([self.manager.slot_content(s) for s in slots.tolist()])
        tokens, positions = step.token_ids.numpy(), step.positions.numpy()
        entries = (tokens * 1_000_003 + positions * 10_007 + contents * 97 + 12_345) % PRIME
        self.cache[step.cache_rows.numpy()] = entries
        logits = torch.full((size, self.info.vocab_size), float("nan"))
        if step.query_lens:
            logits[: len(step.logit_rows)] = self._logits(step, contents)
        return logits.to(self.info.device)

    def _check(self, step: StepInput) -> None:
        total = len(step.token_ids)
        if not total:
            return  # all padding
        assert sum(step.query_lens) == total == len(step.positions) == len(step.cache_rows)
        assert len(step.block_tables) == len(step.query_lens) == len(step.context_lens)
        assert len(set(step.cache_rows.tolist())) == total, "two tokens write one cache row"
        assert step.block_tables.min() >= 0
        assert step.token_ids.min() >= 0, "a token that nobody has chosen"
        assert int(step.block_tables.max()) * self.block_size < len(self.cache)
        expected = [
            position
            for query, context in zip(step.query_lens, step.context_lens, strict=True)
            for position in range(context - query, context)
        ]
        assert step.positions.tolist() == expected

    def _logits(self, step: StepInput, contents: np.ndarray) -> torch.Tensor:
        ends = np.cumsum(step.query_lens)
        hashes = []
        for row in step.logit_rows.tolist():
            sequence = int(np.searchsorted(ends, row, side="right"))
            context = int(step.positions[row]) + 1
            places = np.arange(context)
            blocks = step.block_tables[sequence].numpy()[places // self.block_size]
            entries = self.cache[blocks * self.block_size + places % self.block_size]
            mixed = int((entries * (places * 31 + 7) % PRIME).sum())
            hashes.append((mixed + int(contents[row]) * 131) % PRIME)
        values = np.array(hashes, dtype=np.int64)[:, None] % 1_000_003 * self._columns
        return torch.from_numpy((values % 7919 / 7919.0 * 6.0 - 3.0).astype(np.float32))


class FakeTokenizer:
    """Token t is the two letters of t; token 1 is the end and is special."""

    chat_template = "fake"

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [2 + ord(letter) % 60 for letter in text]

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> str:
        return "".join(self.piece(token, skip_special_tokens) for token in token_ids)

    def piece(self, token: int, skip_special_tokens: bool) -> str:
        if token == EOS:
            return "" if skip_special_tokens else "<eos>"
        return chr(97 + token // 8) + chr(97 + token % 8)

    def apply_chat_template(self, messages: Any, **options: Any) -> str:
        assert options == {"add_generation_prompt": True, "tokenize": False}
        return "".join(f"{m['role']}:{m['content']};" for m in messages)


class BytesTokenizer:
    """Token t is a piece of UTF-8; pieces may cut characters anywhere."""

    def __init__(self, pieces: list[bytes]) -> None:
        self.pieces = pieces

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        raise NotImplementedError

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> str:
        return b"".join(self.pieces[token] for token in token_ids).decode("utf-8", "replace")


def make_engine(
    *,
    num_blocks: int = 64,
    num_slots: int = 2,
    max_model_len: int = 64,
    adapters: tuple[str, ...] = ("red", "green", "blue", "grey"),
    vocab_size: int = VOCAB,
    tokenizer: Any = None,
    device: str = "cpu",
    capturer: Capturer | None = None,
    overlap: bool | None = None,
    **options: Any,
) -> Engine:
    """An engine on the fakes; each adapter's content comes from its name as its path."""
    options = {"block_size": 4, "max_num_seqs": 16, "max_num_batched_tokens": 32, **options}
    options.setdefault("kv_cache_memory", num_blocks * options["block_size"] * BYTES_PER_TOKEN)
    manager = FakeManager(num_slots)
    for name in adapters:
        manager.load(name, name)
    return Engine(
        EngineConfig(max_loras=num_slots, **options),
        model=FakeModel(manager, max_model_len, vocab_size, device),
        tokenizer=tokenizer or FakeTokenizer(),
        adapters=manager,
        capturer=capturer,
        overlap=overlap,
    )


def manager_of(engine: Engine) -> FakeManager:
    manager = engine._adapters
    assert isinstance(manager, FakeManager)
    return manager


def run_all(engine: Engine, max_steps: int = 2000) -> dict[str, RequestOutput]:
    """Step until idle, checking integrity after each step; the last output of each request."""
    last: dict[str, RequestOutput] = {}
    for _ in range(max_steps):
        if not engine.has_unfinished():
            break
        for output in engine.step():
            assert not (output.request_id in last and last[output.request_id].finished)
            last[output.request_id] = output
        engine.check_integrity()
    assert not engine.has_unfinished(), f"still busy after {max_steps} steps"
    manager_of(engine).check_idle()
    return last


def run_one(
    engine: Engine, tokens: list[int], params: SamplingParams, adapter: str | None = None
) -> RequestOutput:
    engine.add_request("one", None, tokens, params, adapter)
    return run_all(engine)["one"]


def greedy(max_tokens: int = 8, **options: Any) -> SamplingParams:
    options = {"temperature": 0.0, "ignore_eos": True, **options}
    return SamplingParams(max_tokens=max_tokens, **options)


def llm_left_idle() -> Iterator[LLM]:
    """For a fixture: an LLM of the fake parts, in which the test must leave nothing behind."""
    llm = LLM.from_engine(make_engine())
    yield llm
    assert not llm.engine.has_unfinished()
    llm.engine.check_integrity()
    manager_of(llm.engine).check_idle()
