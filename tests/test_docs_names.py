"""What the documentation names exists: files, links, and names of code; the changelog's version."""

import re
from functools import cache
from pathlib import Path

import pytest

import vexpert

ROOT = Path(__file__).parent.parent
PAGES = sorted([*(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "bench" / "RESULTS.md"])
# Pages about the code as it is; the others show users' own names too.
OF_THE_CODE = [
    ROOT / "docs" / f"{name}.md" for name in ("design", "request", "lifecycle", "performance")
]
OTHERS = {"F.grouped_mm", "torch.distributed"}  # names of PyTorch's that this code does not use
FOLDERS = ("", "vexpert/", "docs/", "bench/")
TYPES = "py|json|csv|md|toml|txt|yml|js"


@cache
def files() -> frozenset[str]:
    """Names of all files below the folders that the documentation speaks of."""
    folders = ("vexpert", "tests", "bench", "scripts", "docs", "deploy", "examples")
    return frozenset(path.name for name in folders for path in (ROOT / name).rglob("*"))


def prose(page: Path) -> str:
    """A page without its blocks of code. Of a table of rivals' files, our own column."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    if page.name == "yardstick.md":
        rows = [line.split(" | ") for line in text.split("\n")]
        text = "\n".join(" | ".join(row[:2]) if len(row) > 2 else row[0] for row in rows)
    return text


def ids(path: Path) -> str:
    return path.stem


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", prose(page))
    local = [target for target in targets if "://" not in target]
    missing = [target for target in local if not (page.parent / target).exists()]
    assert not missing


@pytest.mark.parametrize("page", OF_THE_CODE, ids=ids)
def test_files_that_are_named_exist(page: Path) -> None:
    named = re.findall(rf"`([\w./-]+\.(?:{TYPES}))\b[^`]*`", prose(page))
    assert named
    missing = [
        name
        for name in named
        if not any((ROOT / folder / name).exists() for folder in FOLDERS)
        if "/" in name or name not in files()
    ]
    assert not missing


@pytest.mark.parametrize("page", OF_THE_CODE, ids=ids)
def test_names_of_code_exist(page: Path) -> None:
    paths = [path for folder in ("vexpert", "tests") for path in (ROOT / folder).rglob("*.py")]
    words = {word for path in paths for word in re.findall(r"\w+", path.read_text())}
    words |= {path.stem for path in paths}
    named = re.findall(r"`(?:[\w/]+\.py: )?([A-Za-z_][\w.]*)(?:\(\))?`", prose(page))
    named = [name for name in named if not re.search(rf"\.(?:{TYPES})$", name)]
    missing = [name for name in named if not set(name.split(".")) <= words]
    assert set(missing) <= OTHERS


def test_the_changelog_begins_with_this_version() -> None:
    heading = re.search(r"(?m)^## (.+)$", (ROOT / "CHANGELOG.md").read_text())
    assert heading is not None
    release, _, dev = vexpert.__version__.partition(".dev")
    assert heading.group(1).startswith(f"{release} (unreleased)" if dev else f"{release} (20")
