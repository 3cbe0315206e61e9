"""Which commit the package is at."""

import subprocess
from pathlib import Path

import pytest

from vexpert import checkout


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("GIT_DIR", raising=False)  # as in a hook
    (tmp_path / "file").write_text("one")
    names = ("-c", "user.name=n", "-c", "user.email=n@localhost")
    for words in (["init", "-q"], ["add", "file"], ["commit", "-qm", "one"], ["tag", "v1"]):
        subprocess.run(["git", *names, *words], cwd=tmp_path, check=True)
    return tmp_path


def head(folder: Path) -> str:
    words = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(words, cwd=folder, text=True, capture_output=True, check=True).stdout


def test_the_commit_and_whether_files_differ(repository: Path) -> None:
    assert checkout.commit(repository) == head(repository).strip()
    (repository / "new").write_text("not tracked")
    assert checkout.commit(repository) == head(repository).strip()
    (repository / "file").write_text("two")
    assert checkout.commit(repository) == f"{head(repository).strip()}-dirty"


def test_none_without_a_checkout_or_git(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "inner").mkdir()
    assert checkout.commit(tmp_path / "inner") is None  # the checkout is another's
    monkeypatch.setenv("PATH", "")
    assert checkout.commit(repository) is None
