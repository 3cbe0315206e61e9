"""Files and functions stay small: the limits of docs/yardstick.md, by scripts/sizes.py."""

import statistics
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))

from sizes import ROOT, Sizes, measure, p95, report


@pytest.fixture(scope="module")
def sizes() -> Sizes:
    return measure(ROOT / "vexpert")


def test_the_script_prints_its_figures(sizes: Sizes) -> None:
    script = [sys.executable, str(ROOT / "scripts" / "sizes.py")]
    printed = subprocess.run(script, capture_output=True, text=True, timeout=60, check=True).stdout
    assert printed == report(sizes) + "\n"
    assert f"lines of files: {len(sizes.files)}, median " in printed


def test_files_are_small(sizes: Sizes) -> None:
    assert 0 < statistics.median(sizes.files.values()) <= 120


def test_functions_are_small(sizes: Sizes) -> None:
    lines = [each.lines for each in sizes.functions]
    assert 0 < statistics.median(lines) <= 10
    assert p95(lines) <= 45


def test_only_kernels_take_more_than_ten_arguments(sizes: Sizes) -> None:
    wide = [each for each in sizes.functions if each.arguments > 10]
    assert not [each.place for each in wide if not each.is_kernel]
    assert wide  # those that Triton compiles have no dataclasses


def test_what_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = (
        "class A:\n    @staticmethod\n    def f(a, /, b, *args, c=1, **more):\n        return 1\n"
    )
    (tmp_path / "a.py").write_text(source + "    def g(self):\n        def h(): pass\n")
    monkeypatch.setattr("sizes.ROOT", tmp_path)
    found = measure(tmp_path)
    assert found.files == {"a.py": 6}
    counted = {each.place: (each.lines, each.arguments) for each in found.functions}
    assert counted == {"a.py: f": (2, 3), "a.py: g": (2, 0), "a.py: h": (1, 0)}
    assert p95(list(range(1, 101))) == 95
    assert p95([7]) == 7
