"""Who leaves memory for whom: the rules alone, without an arena, files or threads."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
from helpers_slots import version_on_host

from vexpert.lora.adapter_state import State
from vexpert.lora.adapter_version import Version
from vexpert.lora.chat_template import ChatTemplate
from vexpert.lora.eviction import (
    DevicePolicy,
    HostPolicy,
    Room,
    is_in_use,
    may_leave_host,
    may_wait_for_host,
)
from vexpert.lora.memory_source import AdapterTensors
from vexpert.lora.pack import PackedAdapter
from vexpert.lora.source import HostCopy, Source
from vexpert.lora.types import AdapterRef

FULL = Room(0, 0)


def packed(nbytes: int) -> PackedAdapter:
    return PackedAdapter(torch.empty(nbytes, dtype=torch.uint8), (), (), 1, ())


def version(nbytes: int = 10, is_pinned: bool = False, holds: int = 0) -> Version:
    made = version_on_host(packed(nbytes), is_pinned)
    made.life.holds = holds
    return made


def enter(policy: DevicePolicy, slot: int, made: Version) -> Version:
    if made.is_pinned:
        assert policy.pin(made, made.life.host_bytes)
    made.life.begin_copy()
    made.life.end_copy(slot, made.life.host_bytes)
    policy.enter(made)
    return made


def device(versions: Iterable[Version]) -> DevicePolicy:
    """Slots 0, 1, ... hold `versions`, and a step has passed since."""
    versions = list(versions)
    nbytes = sum(made.life.host_bytes for made in versions)
    policy = DevicePolicy(nbytes, len(versions))
    for slot, made in enumerate(versions):
        enter(policy, slot, made)
    policy.begin_step()
    return policy


def test_the_least_recently_used_slot_leaves_first() -> None:
    policy = device(version() for _ in range(3))
    policy.use(0)
    policy.unuse(0)  # used last
    policy.use(1)  # in use
    assert policy.victims(10, FULL) == (2,)
    assert policy.victims(20, FULL) == (2, 0)
    assert policy.victims(21, FULL) is None
    policy.check_integrity()


def test_no_more_leave_than_needed() -> None:
    policy = device(version() for _ in range(3))
    assert policy.victims(10, Room(10, 1)) == ()
    assert policy.victims(10, Room(10, 0)) == (0,)  # bytes, but no slot
    assert policy.victims(10, Room(5, 1)) == (0,)
    assert policy.victims(25, Room(5, 1)) == (0, 1)


def test_held_versions_leave_last_and_not_for_a_prefetch() -> None:
    policy = device([version(holds=1), version(), version(holds=2), version()])
    assert policy.victims(30, FULL) == (1, 3, 0)
    assert policy.victims(20, FULL, spare_held=True) == (1, 3)
    assert policy.victims(30, FULL, spare_held=True) is None


def test_pinned_adapters_never_leave() -> None:
    policy = device([version(is_pinned=True), version()])
    assert policy.victims(10, FULL) == (1,)
    assert policy.victims(20, FULL) is None
    pinned, other = policy.in_slot.values()
    assert policy.beside_pinned(other) == (Room(10, 1), {pinned.ref.name: 10})
    assert policy.beside_pinned(pinned) == (Room(20, 2), {})
    pinned.life.is_retired = True  # it leaves with its last request
    policy.unpin(pinned)
    assert policy.beside_pinned(other) == (Room(20, 2), {})
    policy.check_integrity()


def named(name: str, number: int, nbytes: int = 10) -> Version:
    return replace(version(nbytes, is_pinned=True), ref=AdapterRef(name, number))


def test_pinned_adapters_have_room_before_they_are_there() -> None:
    policy = DevicePolicy(30, 2)
    old, other, third = named("a", 1), named("b", 2), named("c", 3)
    assert policy.pin(old, 10)
    assert policy.pin(other, 10)
    assert not policy.pin(third, 1)  # no slot
    assert not policy.pin(old, 21)
    assert policy.beside_pinned(third) == (Room(10, 0), {"a": 10, "b": 10})
    new = named("a", 4)
    assert not policy.pin(new, 21)
    assert policy.pin(new, 20)  # in place of the old one
    assert policy.beside_pinned(third) == (Room(0, 0), {"a": 20, "b": 10})
    assert policy.beside_pinned(old) == (Room(0, 0), {"a": 20, "b": 10})  # it waits for the new one
    policy.unpin(new)
    assert policy.beside_pinned(third) == (Room(10, 0), {"a": 10, "b": 10})
    policy.check_integrity()


def test_what_is_being_read_is_not_counted_where_only_what_was_read_is() -> None:
    policy = DevicePolicy(30, 3)
    coming = Version(AdapterRef("a", 1), Source(Path("a")), is_pinned=True)
    assert policy.pin(coming, 0)  # its size is not known
    assert policy.pin(named("b", 2), 10)
    assert policy.beside_pinned(version()) == (Room(20, 1), {"a": 0, "b": 10})
    assert policy.beside_pinned(version(), read_only=True) == (Room(20, 2), {"b": 10})


def test_pinned_adapters_never_have_more_room_than_there_is() -> None:
    """Against a plain account, with versions that come and go in any order."""
    random = Random(5)
    policy, account = DevicePolicy(50, 4), dict[Version, int]()
    refused = 0
    for number in range(2000):
        made, nbytes = named(random.choice("abcdef"), number), random.randint(1, 25)
        if account and random.random() < 0.45:
            gone = random.choice(list(account))
            policy.unpin(gone)
            del account[gone]
        others = {v.ref.name for v in account} - {made.ref.name}
        largest = [max(n for v, n in account.items() if v.ref.name == name) for name in others]
        fits = sum(largest) + nbytes <= 50 and len(others) < 4
        assert policy.pin(made, nbytes) == fits
        if fits:
            account[made] = nbytes
        refused += not fits
        policy.check_integrity()
    assert 200 < refused < 1800


def test_what_has_come_stays_for_a_step_or_until_it_was_used() -> None:
    policy = device([version()])
    policy.evict(0)
    enter(policy, 0, version())
    assert policy.victims(10, FULL) is None
    policy.use(0)
    policy.unuse(0)
    assert policy.victims(10, FULL) == (0,)
    policy.evict(0)
    enter(policy, 0, version())
    policy.begin_step()
    assert policy.victims(10, FULL) == (0,)


def test_a_slot_in_use_cannot_be_emptied() -> None:
    policy = device([version()])
    policy.use(0)
    with pytest.raises(AssertionError, match="in use by 1"):
        policy.leave(0)


def test_evictions_are_counted_and_removals_are_not() -> None:
    first, second = version(), version()
    policy = device([first, second])
    policy.evict(0)
    assert policy.leave(1) is second
    assert (policy.evictions, first.life.history.evictions) == (1, 1)
    assert second.life.history.evictions == 0
    assert first.life.state is second.life.state is State.HOST


@pytest.mark.parametrize(
    "fault", ["lost", "moved", "claimed", "no room", "leaves", "failed", "not pinned", "too much"]
)
def test_device_integrity_check_sees_planted_faults(fault: str) -> None:
    policy = device([version(), version(), version(is_pinned=True)])
    policy.check_integrity()
    pinned = policy.in_slot[2]
    if fault == "lost":
        policy._idle.pop(0)
    elif fault == "moved":
        policy.in_slot[0].life.slot = 1
    elif fault == "claimed":
        policy._claims.add(5)
    elif fault == "no room":
        policy.unpin(pinned)
    elif fault == "leaves":
        pinned.life.is_retired = True
    elif fault == "failed":
        pinned.life.error = "broken"
    elif fault == "not pinned":
        policy._pinned[policy.in_slot[0]] = 0
    else:
        policy._pinned[pinned] = 31
    with pytest.raises(AssertionError):
        policy.check_integrity()


def test_device_under_random_use() -> None:
    """Against a plain account: times of use in a list, every rule spelled out."""
    random = Random(3)
    policy = DevicePolicy(100, 8)
    used_at: dict[int, int] = {}
    users = dict.fromkeys(range(8), 0)
    for now in range(3000):
        slot = random.randrange(8)
        act = random.choice(["enter", "use", "unuse", "hold", "drop", "choose"])
        here = policy.in_slot.get(slot)
        if act == "enter" and here is None:
            enter(policy, slot, version(random.randint(1, 12), random.random() < 0.1))
            policy.begin_step()
            used_at[slot], users[slot] = now, 0
        elif act == "use" and here is not None:
            policy.use(slot)
            users[slot] += 1
        elif act == "unuse" and here is not None and users[slot]:
            policy.unuse(slot)
            users[slot] -= 1
            used_at[slot] = now
        elif act in ("hold", "drop") and here is not None:
            here.life.holds = int(act == "hold")
        elif act == "choose":
            need = random.randint(1, 40)
            free = [s for s, v in policy.in_slot.items() if not v.is_pinned and not users[s]]
            free.sort(key=lambda s: (policy.in_slot[s].life.holds > 0, used_at[s]))
            expected: list[int] = []
            while free and sum(policy.in_slot[s].life.device_bytes for s in expected) < need:
                expected.append(free.pop(0))
            enough = sum(policy.in_slot[s].life.device_bytes for s in expected) >= need
            got = policy.victims(need, FULL)
            assert got == (tuple(expected) if enough else None)
            for each in got or ():
                policy.evict(each)
        policy.check_integrity()


def host(versions: Iterable[Version], budget: int, most: int | None = None) -> HostPolicy:
    policy = HostPolicy(budget, most)
    for made in versions:
        policy.book(made.life.host_bytes)
        policy.enter(made)
    policy.check_integrity()
    return policy


def test_the_least_recently_used_copy_leaves_first() -> None:
    first, second, third = versions = [version() for _ in range(3)]
    policy = host(versions, 35)
    assert policy.victims(5) == []
    policy.touch(first)
    assert policy.victims(6) == [second]
    assert policy.victims(25) == [second, third]
    assert policy.victims(100) == [second, third, first]  # too little; it waits for more
    policy.leave(second)
    assert policy.fits(15)
    assert not policy.fits(16)


def test_too_many_copies() -> None:
    versions = [version(holds=index == 1) for index in range(4)]
    assert host(versions, 100, most=4).surplus() == []
    assert host(versions, 100, most=2).surplus() == [versions[0], versions[2]]
    assert host(versions, 100, most=0).surplus() == [versions[0], versions[2], versions[3]]
    assert host(versions, 100).surplus() == []


def test_what_may_leave_the_host() -> None:
    idle, waiting, ready = version(), version(holds=1), version(holds=1)
    policy = device([ready])
    assert may_leave_host(idle)
    assert not may_leave_host(waiting)  # its requests wait for the device
    assert may_leave_host(ready)  # its requests have it there
    copying = version()
    copying.life.begin_copy()
    assert not may_leave_host(copying)
    assert policy.in_slot[0] is ready


def test_what_no_file_could_give_back_stays() -> None:
    source = Source(AdapterTensors({}, {}))
    made = Version(AdapterRef("m", 1), source)
    content = packed(10)
    made.life.begin_read()
    made.life.buffer = content.buffer
    made.life.end_read(HostCopy(content, (), (), ChatTemplate()), 0.0)
    policy = host([made, other := version()], 20)
    assert policy.lasting_bytes(but_leaving=False) == 10
    assert policy.victims(20) == [other]


def test_bytes_are_booked_before_they_exist() -> None:
    policy = host([version()], 30)
    policy.book(15)
    assert not policy.fits(6)
    policy.unbook(15)
    assert policy.fits(20)


def test_who_may_wait_and_who_has_to_live_on() -> None:
    held, pinned, idle, used = version(holds=1), version(is_pinned=True), version(), version()
    policy = device([used])
    assert [may_wait_for_host(each) for each in (held, pinned, idle)] == [True, True, False]
    policy.use(0)
    assert [is_in_use(each, policy) for each in (held, pinned, idle, used)] == [
        True,
        False,
        False,
        True,
    ]
    idle.life.begin_copy()
    assert is_in_use(idle, policy)
