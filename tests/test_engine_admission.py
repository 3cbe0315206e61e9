"""The admission policy on its own: 10,000 adapters, zipf arrivals, and the bound on passing."""

from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from random import Random

import pytest

from vexpert.engine.admission import Admission, parse_weights, tenant_of
from vexpert.errors import ConfigError
from vexpert.lora.types import AdapterRef, Wait


@dataclass(eq=False)
class Job:
    """A request of the simulation."""

    arrival: int
    adapter: AdapterRef | None
    service: int = 4  # steps it runs
    times_passed: int = 0
    share_tag: float = 0.0
    passed_by: int = 0  # counted by the simulation, not by the policy
    ready_at: int = 0  # step at which its weights are on the host
    started: int | None = None


@dataclass
class World:
    """Slots with least-recently-used eviction, and the waiting requests."""

    policy: Admission
    slots: int = 16
    batch: int = 32
    waiting: list[Job] = field(default_factory=list)
    running: dict[Job, int] = field(default_factory=dict)  # steps left
    resident: OrderedDict[AdapterRef, int] = field(default_factory=OrderedDict)  # -> pins
    loads: int = 0
    now: int = 0
    finished: list[Job] = field(default_factory=list)

    def acquire(self, job: Job) -> Wait | None:
        adapter = job.adapter
        if adapter is None:
            return None
        if adapter not in self.resident:
            if self.now < job.ready_at:
                return Wait.COMING
            if len(self.resident) == self.slots:
                idle = next((ref for ref, pins in self.resident.items() if not pins), None)
                if idle is None:
                    return Wait.NO_ROOM
                del self.resident[idle]
            self.resident[adapter] = 0
            self.loads += 1
        self.resident[adapter] += 1
        self.resident.move_to_end(adapter)
        return None

    def step(self, arrivals: list[Job]) -> None:
        for job in arrivals:
            self.policy.add(job)
            self.waiting.append(job)
        self._admit()
        for job in list(self.running):
            self.running[job] -= 1
            if not self.running[job]:
                self._end(job)
        self.now += 1

    def _admit(self) -> None:
        turns = self.policy.turns(self.waiting)
        refused: set[Job] = set()
        for job in turns:
            if len(self.running) == self.batch:
                break
            why = self.acquire(job)
            if why is not None:
                turns.refuse(job, why)
                if why is Wait.NO_ROOM:
                    refused.add(job)
                continue
            turns.admit(job)
            job.started = self.now
            self.waiting.remove(job)
            self.running[job] = job.service
            if job.adapter is not None:
                for other in refused:
                    other.passed_by += other.arrival < job.arrival

    def _end(self, job: Job) -> None:
        del self.running[job]
        self.policy.stopped(job)
        if job.adapter is not None:
            self.resident[job.adapter] -= 1
        self.finished.append(job)


def zipf_names(count: int, adapters: int, seed: int) -> list[str]:
    weights = [1 / (rank + 1) for rank in range(adapters)]
    return [f"a{i}" for i in Random(seed).choices(range(adapters), weights, k=count)]


def simulate(
    world: World, names: list[str], per_step: int, seed: int = 0, slow: float = 0.0
) -> list[Job]:
    """Run all requests to their end; `slow`: share of adapters whose first read takes 50 steps."""
    random = Random(seed)
    jobs, first_seen = [], {}
    for index, name in enumerate(names):
        ref = AdapterRef(name, 1)
        arrives = index // per_step
        wait = 50 if random.random() < slow else 2
        ready = first_seen.setdefault(ref, arrives + wait)
        jobs.append(Job(index, ref, random.randint(2, 6), ready_at=ready))
    for start in range(0, len(jobs), per_step):
        world.step(jobs[start : start + per_step])
    for _ in range(20 * len(jobs)):
        if not world.waiting and not world.running:
            return jobs
        world.step([])
    raise AssertionError(f"{len(world.waiting)} requests never started")


@pytest.mark.parametrize("max_passed", [0, 8, 64])
def test_ten_thousand_adapters_and_nobody_starves(max_passed: int) -> None:
    world = World(Admission(max_passed))
    jobs = simulate(world, zipf_names(6_000, 10_000, seed=1), per_step=8, slow=0.1)
    assert len(world.finished) == len(jobs)
    assert len({job.adapter for job in jobs}) > 1_900
    assert max(job.passed_by for job in jobs) <= max_passed
    assert all(job.times_passed >= job.passed_by for job in jobs)
    assert not world.policy.running


def test_passing_groups_by_adapter_and_saves_loads() -> None:
    names = zipf_names(3_000, 200, seed=2)
    loads, ends = {}, {}
    for max_passed in (0, 64):
        world = World(Admission(max_passed), slots=8)
        simulate(world, names, per_step=8)
        loads[max_passed], ends[max_passed] = world.loads, world.now
    assert loads[64] < 0.9 * loads[0]
    assert ends[64] < 0.9 * ends[0]


def test_the_bound_is_in_completions() -> None:
    """Hot adapters arrive without end; a cold one starts after its bound of others has started."""
    world = World(Admission(max_passed=10), slots=2, batch=8)
    cold = Job(3, AdapterRef("cold", 1))
    arrival = 0
    for _ in range(400):
        jobs = []
        for name in ("hot1", "hot2"):
            if arrival == cold.arrival:
                jobs.append(cold)
                arrival += 1
            jobs.append(Job(arrival, AdapterRef(name, 1)))
            arrival += 1
        world.step(jobs)
        if cold.started is not None:
            break
    assert cold.passed_by == 10
    assert world.now <= 10 + 2 * cold.service


def test_a_read_that_hangs_stops_nobody() -> None:
    world = World(Admission(max_passed=4), slots=2)
    stuck = Job(0, AdapterRef("stuck", 1), ready_at=10**9)
    world.step([stuck])
    for index in range(1, 200):
        world.step([Job(index, AdapterRef(f"a{index % 3}", 1))])
    assert stuck.started is None
    assert stuck.times_passed == 0
    assert len(world.finished) > 180


def test_the_cap_holds_and_leaves_room_for_others() -> None:
    world = World(Admission(max_running=3), batch=8)
    hot = [Job(i, AdapterRef("hot", 1), service=10) for i in range(50)]
    others = [Job(50 + i, AdapterRef(f"b{i}", 1)) for i in range(4)]
    world.step(hot + others)
    for _ in range(300):
        running = Counter(job.adapter for job in world.running)
        assert running[AdapterRef("hot", 1)] <= 3
        world.step([])
    assert all(job.started == 0 for job in others)
    assert all(job.started is not None for job in hot)
    assert all(job.times_passed == 0 for job in hot)  # its own cap is nobody's passing


def test_tenants_get_their_shares_and_nobody_starves() -> None:
    policy = Admission(max_passed=64, weights={"gold": 3.0, "iron": 1.0})
    world = World(policy, slots=16, batch=4)
    jobs = [
        Job(i, AdapterRef(f"{'gold' if i % 2 else 'iron'}/{i % 5}", 1), service=2)
        for i in range(400)
    ]
    world.step(jobs)
    for _ in range(60):
        world.step([])
    started = Counter(tenant_of(job.adapter) for job in jobs if job.started is not None)
    assert 2.5 < started["gold"] / started["iron"] < 3.5
    for _ in range(400):
        world.step([])
    assert len(world.finished) == 400


def test_shares_never_pass_one_request_more_often_than_the_bound() -> None:
    policy = Admission(max_passed=20, weights={"gold": 1000.0})
    world = World(policy, slots=16, batch=2)
    iron = Job(1, AdapterRef("iron/x", 1))
    passed = 0
    for step in range(200):
        jobs = [Job(100 + 2 * step + k, AdapterRef("gold/y", 1), service=1) for k in range(2)]
        world.step(([Job(0, AdapterRef("iron/w", 1)), iron] if step == 0 else []) + jobs)
        if iron.started is not None:
            break
        passed = sum(job.started is not None for job in world.finished if job.arrival > 1)
    assert iron.times_passed <= 20
    assert passed <= 20


def test_weights_are_checked() -> None:
    assert parse_weights(None) == {}
    assert parse_weights('{"a": 2, "b": 0.5}') == {"a": 2.0, "b": 0.5}
    for bad in ("{", "[1]", '{"a": 0}', '{"a": "x"}', '{"a": true}'):
        with pytest.raises(ConfigError, match="lora_weights"):
            parse_weights(bad)
