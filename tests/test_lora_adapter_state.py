"""A version's states: the table is whole, and nothing happens that it does not allow."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers_adapters import adapter, tiny_targets
from helpers_slots import version_on_host

from vexpert.lora.adapter_state import AFTER, Event, Life, State
from vexpert.lora.adapter_version import Version
from vexpert.lora.chat_template import ChatTemplate
from vexpert.lora.pack import pack
from vexpert.lora.source import HostCopy, Source
from vexpert.lora.types import AdapterRef

TARGETS = tiny_targets()
PACKED = pack(adapter(TARGETS, 0, 2, ("q",)), TARGETS, torch.float32)
HOST = HostCopy(PACKED, (), ("a warning",), ChatTemplate())
NBYTES = PACKED.nbytes


def read(life: Life) -> None:
    life.buffer = PACKED.buffer  # as the host tier sets it before the read has ended
    life.end_read(HOST, 0.5)


ACTS: dict[Event, Callable[[Life], object]] = {
    Event.READ_BEGINS: Life.begin_read,
    Event.READ_ENDS: read,
    Event.READ_IS_GIVEN_UP: Life.give_up_read,
    Event.COPY_BEGINS: Life.begin_copy,
    Event.COPY_ENDS: lambda life: life.end_copy(3, NBYTES),
    Event.LEAVES_DEVICE: Life.leave_device,
    Event.LEAVES_HOST: Life.leave_host,
    Event.FAILS: lambda life: life.fail("a reason"),
}
# A way to each state from REGISTERED.
PATHS: dict[State, tuple[Event, ...]] = {
    State.REGISTERED: (),
    State.LOADING: (Event.READ_BEGINS,),
    State.HOST: (Event.READ_BEGINS, Event.READ_ENDS),
    State.COPYING: (Event.READ_BEGINS, Event.READ_ENDS, Event.COPY_BEGINS),
    State.BOTH: (Event.READ_BEGINS, Event.READ_ENDS, Event.COPY_BEGINS, Event.COPY_ENDS),
    State.DEVICE: (
        Event.READ_BEGINS,
        Event.READ_ENDS,
        Event.COPY_BEGINS,
        Event.COPY_ENDS,
        Event.LEAVES_HOST,
    ),
    State.ERRORED: (Event.READ_BEGINS, Event.READ_ENDS, Event.FAILS),
}


def life_in(state: State) -> Life:
    life = Life()
    for event in PATHS[state]:
        ACTS[event](life)
    assert life.state is state
    return life


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("event", Event)
def test_only_what_the_table_allows_happens(event: Event, state: State) -> None:
    life = life_in(state)
    after = AFTER[event].get(state)
    if after is None:
        with pytest.raises(AssertionError):
            ACTS[event](life)
        assert life.state is state
        return
    ACTS[event](life)
    assert life.state is after
    if after is not State.ERRORED:  # its memory is still to be freed
        life.check_integrity()


def test_no_state_is_left_out_and_an_error_is_for_good() -> None:
    assert set(AFTER) == set(Event)
    reached = {after for table in AFTER.values() for after in table.values()}
    assert reached == set(State)
    ways_out = {
        after for table in AFTER.values() for was, after in table.items() if was.name == "ERRORED"
    }
    assert ways_out == {State.ERRORED}


@pytest.mark.parametrize("field", ["slot", "host", "error", "buffer"])
def test_integrity_check_sees_planted_faults(field: str) -> None:
    life = life_in(State.REGISTERED)
    life.check_integrity()
    value = {"slot": 1, "host": HOST, "error": "x", "buffer": PACKED.buffer}[field]
    setattr(life, field, value)
    with pytest.raises(AssertionError):
        life.check_integrity()


@pytest.mark.parametrize(
    ("state", "shown", "tier"),
    [
        (State.REGISTERED, "registered", "disk"),
        (State.LOADING, "loading", "disk"),
        (State.HOST, "host", "host"),
        (State.COPYING, "host", "host"),
        (State.BOTH, "device", "device"),
        (State.DEVICE, "device", "device"),
        (State.ERRORED, "errored", "disk"),
    ],
)
def test_what_users_are_told(state: State, shown: str, tier: str) -> None:
    version = Version(AdapterRef("a", 1), Source(Path("a")), life=life_in(state))
    info = version.info()
    assert (info.state, info.tier) == (shown, tier)
    assert info.slot == (3 if shown == "device" else -1)
    assert info.rank == (2 if version.life.contents else 0)
    version.life.is_retired = True
    assert version.info().state == "draining"


def test_a_version_is_frozen_but_for_its_life() -> None:
    version = version_on_host(PACKED)
    with pytest.raises(AttributeError):
        version.is_pinned = True  # type: ignore[misc]
    version.life.leave_host()
    assert version.life.contents is not None  # what was read once is known
    assert version.info().loads == 1
