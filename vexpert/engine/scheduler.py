"""Which tokens of which sequences the next step computes.

A sequence gets the blocks of all its tokens when it is admitted; after that it needs one more
block each time its last one is full. The budget of a step goes to decodes first, then to prompts
under way, then to waiting sequences in order of arrival. When no block is left, the newest running
sequence loses its blocks and waits to be recomputed; the oldest one always goes on, so every
sequence ends.

Who of those that wait may start first, and how long one may be passed, is `engine/admission.py`'s.
"""

from bisect import insort
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from vexpert.engine.adapters import AdapterSource
from vexpert.engine.admission import MAX_PASSED, Admission
from vexpert.engine.block_pool import BlockPool
from vexpert.engine.request import Sequence, State
from vexpert.lora.types import AdapterRef, Wait

PREFETCH = 4  # adapters of the oldest waiting requests that are brought nearer
PREFETCH_WINDOW = 64  # waiting requests that are looked at for them


class Chunk(NamedTuple):
    """Tokens `start .. start + size - 1` of a sequence, computed in one step."""

    sequence: Sequence
    start: int
    size: int


def _arrival(sequence: Sequence) -> int:
    return sequence.arrival


class Scheduler:
    """Owns the queues, the block tables and the slots of sequences. The engine's thread only."""

    def __init__(
        self,
        pool: BlockPool,
        adapters: AdapterSource,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        enable_prefix_caching: bool = True,
        max_passed: int = MAX_PASSED,
        max_requests_per_lora: int | None = None,
        weights: Mapping[str, float] | None = None,
    ) -> None:
        self.pool = pool
        self.adapters = adapters
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.enable_prefix_caching = enable_prefix_caching
        self.admission = Admission(max_passed, max_requests_per_lora, weights)
        self.waiting: list[Sequence] = []  # both queues: oldest first
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self.prefix_query_tokens = 0
        self.prefix_hit_tokens = 0

    def add(self, sequence: Sequence) -> None:
        self.admission.add(sequence)
        self._wait(sequence)

    def _wait(self, sequence: Sequence) -> None:
        insort(self.waiting, sequence, key=_arrival)

    def schedule(self) -> list[Chunk]:
        """The chunks of the next step, decodes first; takes blocks and slots, may preempt."""
        preemptions = self.num_preemptions
        chunks = self._decodes()
        budget = self.max_num_batched_tokens - len(chunks)
        budget = self._continue_prompts(chunks, budget)
        if self.num_preemptions == preemptions:
            self._admit(chunks, budget)
        self._prefetch()
        return chunks

    def commit(self, chunk: Chunk) -> None:
        """The chunk's KV is written before that of any later step: advance, and publish."""
        chunk.sequence.num_computed += chunk.size
        self.publish(chunk.sequence)

    def publish(self, sequence: Sequence) -> None:
        """Let others share the full blocks of a running sequence whose tokens are all known."""
        size = self.pool.block_size
        if not self.enable_prefix_caching or sequence.num_computed < sequence.publish_from:
            return
        full = min(sequence.num_computed, sequence.num_known) // size
        if full > sequence.num_published:
            digests = sequence.digests(full, size)
            for index in range(sequence.num_published, full):
                self.pool.publish(sequence.blocks.ids[index], digests[index])
            sequence.num_published = full
            sequence.publish_from = (full + 1) * size

    def finish(self, sequence: Sequence) -> None:
        """End a sequence in any state and give back all it holds."""
        if sequence.state is State.RUNNING:
            self._stop_running(sequence)
        elif sequence.state is State.WAITING:
            self.waiting.remove(sequence)
        sequence.state = State.FINISHED

    def _decodes(self) -> list[Chunk]:
        chunks = []
        for sequence in [s for s in self.running if len(s.tokens) - s.num_computed == 1]:
            if sequence.is_ending:
                continue
            if sequence.state is State.RUNNING and self._has_block_for_next(sequence):
                chunks.append(Chunk(sequence, sequence.num_computed, 1))
        return chunks

    def _has_block_for_next(self, sequence: Sequence) -> bool:
        """Give `sequence` a block for its next token; False if it had to be preempted itself."""
        if sequence.num_computed < len(sequence.blocks.ids) * self.pool.block_size:
            return True
        while self.pool.num_available == 0:
            newest = self.running[-1]
            self._preempt(newest)
            if newest is sequence:
                return False
        sequence.blocks.extend([self.pool.allocate()])
        return True

    def _continue_prompts(self, chunks: list[Chunk], budget: int) -> int:
        for sequence in self.running:
            if len(sequence.tokens) - sequence.num_computed > 1 and budget > 0:
                budget -= self._add_chunk(chunks, sequence, budget)
        return budget

    def _add_chunk(self, chunks: list[Chunk], sequence: Sequence, budget: int) -> int:
        size = min(len(sequence.tokens) - sequence.num_computed, budget)
        chunks.append(Chunk(sequence, sequence.num_computed, size))
        return size

    def _admit(self, chunks: list[Chunk], budget: int) -> None:
        turns = self.admission.turns(self.waiting)
        for sequence in turns if budget > 0 else ():
            if budget <= 0 or len(self.running) >= self.max_num_seqs:
                return
            if self._must_wait_for_sibling(sequence):
                continue
            cached = self._cached_blocks(sequence)
            if not self._fits(sequence, cached):
                return
            if (why := self._take_slot(sequence)) is not None:
                turns.refuse(sequence, why)
                continue
            turns.admit(sequence)
            self._start(sequence, cached)
            budget -= self._add_chunk(chunks, sequence, budget)

    def _prefetch(self) -> None:
        """Bring the adapters of the oldest waiting sequences nearer while others run."""
        refs: dict[AdapterRef, None] = {}
        for sequence in self.waiting[:PREFETCH_WINDOW]:
            if sequence.adapter is not None and len(refs) < PREFETCH:
                refs[sequence.adapter] = None
        if refs:
            self.adapters.prefetch(refs)

    def _must_wait_for_sibling(self, sequence: Sequence) -> bool:
        request = sequence.request
        shares = self.enable_prefix_caching and len(request.sequences) > 1
        return shares and request.prompt_is_running()

    def _cached_blocks(self, sequence: Sequence) -> list[int]:
        """Published blocks of its longest prefix; at least the last token is left to compute."""
        if not self.enable_prefix_caching:
            return []
        limit = len(sequence.tokens) - 1
        if sequence.wants_prompt_logprobs:
            missing = sequence.num_prompt_rows_done() < len(sequence.request.prompt_token_ids) - 1
            limit = sequence.num_prompt_rows_done() if missing else limit
        size = self.pool.block_size
        return self.pool.match(sequence.digests(limit // size, size))

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.pool.block_size)

    def _fits(self, sequence: Sequence, cached: list[int]) -> bool:
        """Whether its blocks can be had, with one more left over for each running sequence."""
        new = self._blocks_for(len(sequence.tokens)) - len(cached)
        rest = self.pool.num_available - self.pool.num_idle(cached) - new
        return rest >= len(self.running)

    def _take_slot(self, sequence: Sequence) -> Wait | None:
        """Use the adapter's slot for `sequence`, if it has an adapter; why not, or None."""
        if sequence.adapter is not None:
            slot = self.adapters.acquire(sequence.adapter)
            if isinstance(slot, Wait):
                return slot
            sequence.slot = slot
        return None

    def _start(self, sequence: Sequence, cached: list[int]) -> None:
        self.pool.share(cached)
        new = self._blocks_for(len(sequence.tokens)) - len(cached)
        sequence.blocks.extend(cached + [self.pool.allocate() for _ in range(new)])
        sequence.num_computed = len(cached) * self.pool.block_size
        sequence.num_published = len(cached)
        sequence.publish_from = (len(cached) + 1) * self.pool.block_size
        if not sequence.was_admitted:
            self._count_prefix(sequence)
        sequence.was_admitted = True
        sequence.times_passed = 0
        sequence.state = State.RUNNING
        self.waiting.remove(sequence)
        insort(self.running, sequence, key=_arrival)

    def _count_prefix(self, sequence: Sequence) -> None:
        self.prefix_query_tokens += len(sequence.tokens)
        self.prefix_hit_tokens += sequence.num_computed
        if sequence.index == 0:
            sequence.request.num_cached_tokens = sequence.num_computed

    def _preempt(self, sequence: Sequence) -> None:
        self._stop_running(sequence)
        sequence.state = State.WAITING
        sequence.num_computed = 0
        self.num_preemptions += 1
        self._wait(sequence)

    def _stop_running(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.admission.stopped(sequence)
        self.pool.release(sequence.blocks.clear())
        if sequence.adapter is not None:
            self.adapters.release(sequence.adapter)
            sequence.slot = -1

    def check_integrity(self) -> None:
        """Assert that queues, block tables and slots agree."""
        self.pool.check_integrity([s.blocks.ids for s in self.running])
        for queue, state in ((self.waiting, State.WAITING), (self.running, State.RUNNING)):
            assert all(s.state is state for s in queue), f"a sequence in {state} is not"
            assert [s.arrival for s in queue] == sorted({s.arrival for s in queue})
        for sequence in self.running:
            room = len(sequence.blocks.ids) * self.pool.block_size
            assert sequence.num_computed < len(sequence.tokens) <= room + 1
            assert (sequence.slot >= 0) == (sequence.adapter is not None)
        assert all(not s.blocks.ids and s.slot == -1 for s in self.waiting)
        running = Counter(s.adapter for s in self.running if s.adapter is not None)
        assert running == self.admission.running, "the policy counts other running requests"
