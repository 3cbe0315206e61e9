"""Thousands of versions by name: pages, single names, and the few that a message shows."""

from pathlib import Path
from threading import RLock

import pytest
from helpers_engine import make_engine
from test_lora_manager import acquire, folder, make

from vexpert.lora import listing
from vexpert.lora.adapter_version import Version
from vexpert.lora.listing import Listing
from vexpert.lora.source import Source
from vexpert.lora.types import AdapterRef


def version(name: str, number: int = 1) -> Version:
    return Version(AdapterRef(name, number), Source(Path("somewhere")))


def filled(*versions: Version) -> Listing:
    found = Listing(RLock(), {each.ref.name: each for each in versions})
    for each in versions:
        found.add(each)
    return found


def refs(infos: list) -> list[str]:
    return [f"{info.name}{info.version}" for info in infos]


def test_all_are_in_the_order_of_names_and_versions() -> None:
    versions = [version("b", 3), version("a", 12), version("b", 2), version("a", 4)]
    found = filled(*versions)
    assert refs(found.all()) == ["a4", "a12", "b2", "b3"]
    found.check_integrity(versions)
    found.remove(versions[1])
    assert refs(found.all()) == ["a4", "b2", "b3"]
    with pytest.raises(AssertionError, match="is wrong"):
        found.check_integrity(versions)


def test_names_are_found_with_all_their_versions() -> None:
    found = filled(version("b", 3), version("a", 1), version("b", 2), version("ba", 5))
    assert refs(found.named(["b", "nobody", "a"])) == ["b2", "b3", "a1"]
    assert found.named(["", "c"]) == []


@pytest.mark.parametrize("most", [1, 2, 3, 100])
def test_pages_together_are_all(most: int) -> None:
    found = filled(*(version(f"n{i % 7}", i) for i in range(20)))
    pages, after = [], None
    while True:
        infos, after = found.page(after, most)
        pages.append(infos)
        if after is None:
            break
    assert [info for page in pages for info in page] == found.all()
    assert all(len({info.name for info in page}) == most for page in pages[:-1])


def test_a_page_holds_wanted_states_and_names() -> None:
    kept = version("Upper", 1)
    kept.life.is_retired = True
    found = filled(kept, version("lower", 2), version("supper", 3))
    assert refs(found.page(None, 9, frozenset({"draining"})).infos) == ["Upper1"]
    assert refs(found.page(None, 9, frozenset(), "upper").infos) == ["Upper1", "supper3"]
    assert refs(found.page("lower", 9, frozenset(), "upper").infos) == ["supper3"]
    assert refs(found.page(None, 9, frozenset({"registered"}), "upper").infos) == ["supper3"]


def test_one_call_looks_at_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "EXAMINED", 10)
    monkeypatch.setattr(listing, "EXAMINED_FOR_NAMES", 15)
    found = filled(*(version(f"n{i:04d}", i) for i in range(1000)))
    looked_at = 0

    def count(self: Version) -> str:
        nonlocal looked_at
        looked_at += 1
        return "registered"

    monkeypatch.setattr(Version, "shown_state", property(count))
    assert found.page(None, 9, frozenset({"device"})) == ([], "n0009")
    assert looked_at == 10
    assert found.some_names(3).names == ["n0000", "n0001", "n0002"]
    assert refs(found.named(["n0500"])) == ["n0500500"]
    assert looked_at == 26  # one more is of the info


def test_a_message_shows_the_first_names_and_counts_the_rest() -> None:
    broken = version("a")
    broken.life.begin_read()
    broken.life.fail("torn")
    names = [broken, *(version(each) for each in "cb")]
    assert str(filled(*names).some_names(5)) == "b, c"
    assert str(filled(*names).some_names(5, without=())) == "a, b, c"
    assert str(filled(*names).some_names(1)) == "b and 1 more"
    assert str(filled().some_names(5)) == "none"


def test_the_folder_of_one_name_is_found_by_a_look_at_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, manager = make_engine(), make()
    monkeypatch.setattr(engine, "_adapters", manager)
    for seed, name in enumerate(("a", "b", "c")):
        manager.load(name, folder(tmp_path, name, seed))
    ref = manager.hold_newest("b")
    assert acquire(manager, ref) is not None
    manager.load("b", folder(tmp_path, "b2", 7), load_inplace=True)  # the first one drains
    monkeypatch.setattr(listing.Listing, "all", None)
    assert engine.adapter_folder("b") == str(tmp_path / "b2")
    assert engine.adapter_folder("nobody") is None
    manager.unload("b")
    assert engine.adapter_folder("b") is None
    manager.release(ref)
    manager.drop(ref)
