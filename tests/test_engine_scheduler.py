"""The scheduler alone: order, budget, blocks, preemption, and turns for adapter slots."""

from helpers_engine import FakeManager, FakeTokenizer

from vexpert.engine.block_pool import BlockPool
from vexpert.engine.detokenizer import Detokenizer
from vexpert.engine.request import Request, Sequence, State
from vexpert.engine.sampler_state import SamplerState
from vexpert.engine.sampling_params import SamplingParams
from vexpert.engine.scheduler import Scheduler


class Bench:
    """A scheduler and a loop that appends token 2 wherever a token is due."""

    def __init__(self, num_blocks: int = 32, num_slots: int = 1, **options: int) -> None:
        self.manager = FakeManager(num_slots)
        for name in ("red", "green", "blue"):
            self.manager.load(name, name)
        options = {"max_num_seqs": 8, "max_num_batched_tokens": 16, **options}
        self.scheduler = Scheduler(BlockPool(num_blocks, 4), self.manager, **options)
        self.count = 0

    def add(self, length: int, adapter: str | None = None, token: int = 3) -> Sequence:
        ref = None if adapter is None else self.manager.resolve(adapter)
        if ref is not None:
            self.manager.hold(ref)
        params = SamplingParams()
        request = Request(str(self.count), None, [token] * length, params, ref)
        state = SamplerState(params, request.prompt_token_ids, ())
        sequence = Sequence(
            request, 0, self.count, state, Detokenizer(FakeTokenizer(), skip_special_tokens=True)
        )
        request.sequences = [sequence]
        self.count += 1
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> list[tuple[int, int, int]]:
        """(arrival, start, size) of each chunk."""
        chunks = self.scheduler.schedule()
        for chunk in chunks:
            self.scheduler.commit(chunk)
            if chunk.start + chunk.size == len(chunk.sequence.tokens):
                chunk.sequence.append(2)
        self.scheduler.check_integrity()
        return [(chunk.sequence.arrival, chunk.start, chunk.size) for chunk in chunks]


def test_decodes_come_first_and_a_prompt_takes_what_is_left() -> None:
    bench = Bench()
    bench.add(3)
    assert bench.step() == [(0, 0, 3)]
    bench.add(40, token=4)
    assert bench.step() == [(0, 3, 1), (1, 0, 15)]
    bench.add(2, token=5)
    assert bench.step() == [(0, 4, 1), (1, 15, 15)]
    assert bench.step() == [(0, 5, 1), (1, 30, 10), (2, 0, 2)]
    assert bench.step() == [(0, 6, 1), (1, 40, 1), (2, 2, 1)]


def test_max_num_seqs_bounds_the_running() -> None:
    bench = Bench(max_num_seqs=2)
    for _ in range(3):
        bench.add(2)
    assert [chunk[0] for chunk in bench.step()] == [0, 1]
    bench.scheduler.finish(bench.scheduler.running[0])
    assert [chunk[0] for chunk in bench.step()] == [1, 2]


def test_the_newest_is_preempted_and_recomputed_from_the_cache() -> None:
    bench = Bench(num_blocks=5)
    old, new = bench.add(7, token=3), bench.add(8, token=4)
    assert bench.step() == [(0, 0, 7), (1, 0, 8)]
    assert bench.step() == [(0, 7, 1), (1, 8, 1)]  # the newest takes the last block
    assert bench.step() == [(0, 8, 1)]  # the oldest needs one: the newest gives back three
    assert (old.state, new.state, new.num_computed) == (State.RUNNING, State.WAITING, 0)
    assert bench.scheduler.num_preemptions == 1
    bench.scheduler.finish(old)
    assert bench.step() == [(1, 8, 2)]  # its full blocks were still published
    assert new.tokens == [4] * 8 + [2] * 3


def test_no_livelock_when_nobody_fits_beside_another() -> None:
    bench = Bench(num_blocks=4)
    left = {0: bench.add(5), 1: bench.add(5, token=4), 2: bench.add(5, token=5)}
    for _ in range(60):
        bench.step()
        for arrival, sequence in list(left.items()):
            if len(sequence.tokens) >= 14:
                bench.scheduler.finish(left.pop(arrival))
    assert not left
    assert bench.scheduler.pool.num_used == 0


def test_a_slot_shortage_lets_base_and_resident_adapters_pass() -> None:
    bench = Bench(num_slots=1)
    bench.add(2, "red")
    bench.add(2, "green")
    bench.add(2)
    bench.add(2, "red")
    assert [chunk[0] for chunk in bench.step()] == [0, 2, 3]


def wait_of_green(max_passed: int, arrivals_per_step: int) -> tuple[int, int]:
    """Newer red requests that start before green, and steps until green starts.

    Red requests of 3 tokens arrive all the time, so that red's slot is never idle by itself.
    """
    bench = Bench(num_slots=1, max_passed=max_passed, num_blocks=256, max_num_batched_tokens=64)
    bench.scheduler.max_num_seqs = 64
    bench.add(2, "red")
    bench.step()
    green = bench.add(2, "green")
    reds: list[Sequence] = []
    for step in range(500):
        reds += [bench.add(2, "red") for _ in range(arrivals_per_step)]
        bench.step()
        if green.state is State.RUNNING:
            assert green.slot == 0
            return sum(red.was_admitted for red in reds), step
        for sequence in list(bench.scheduler.running):
            if len(sequence.tokens) >= 5:
                bench.scheduler.finish(sequence)
    raise AssertionError("green starved")


def test_nobody_starves_for_a_slot() -> None:
    for max_passed in (0, 1, 5, 20):
        for arrivals in (1, 3):
            passed, steps = wait_of_green(max_passed, arrivals)
            assert passed == max_passed
            assert steps <= max_passed / arrivals + 5


def test_several_due_are_served_in_order_of_arrival() -> None:
    bench = Bench(num_slots=1, max_passed=2)
    bench.add(2, "red")
    bench.step()
    green, blue = bench.add(2, "green"), bench.add(2, "blue")
    reds = [bench.add(2, "red") for _ in range(4)]
    assert [chunk[0] for chunk in bench.step()] == [0, 3, 4]
    for sequence in list(bench.scheduler.running):
        bench.scheduler.finish(sequence)
    assert [chunk[0] for chunk in bench.step()] == [green.arrival]
    bench.scheduler.finish(green)
    assert [chunk[0] for chunk in bench.step()] == [blue.arrival]
    bench.scheduler.finish(blue)
    assert [chunk[0] for chunk in bench.step()] == [red.arrival for red in reds[2:]]


def test_lack_of_blocks_stops_those_behind() -> None:
    bench = Bench(num_blocks=6)
    bench.add(12)
    bench.step()
    bench.add(12, token=4)
    bench.add(1, token=5)
    assert [chunk[0] for chunk in bench.step()] == [0]


def test_a_finished_prefix_is_not_computed_again() -> None:
    bench = Bench()
    first = bench.add(10)
    bench.step()
    bench.scheduler.finish(first)
    bench.add(10)
    assert bench.step() == [(1, 8, 2)]
    bench.add(8)  # equal to two full blocks: the last token is computed all the same
    assert bench.step() == [(1, 10, 1), (2, 4, 4)]
    assert bench.scheduler.prefix_hit_tokens == 12
