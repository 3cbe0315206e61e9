"""The commit of the checkout that the package lies in."""

import subprocess
from pathlib import Path

import vexpert

# A tag would stand in front of the commit: none is looked for.
DESCRIBE = ("describe", "--always", "--dirty", "--exclude", "*")


def commit(root: Path | None = None) -> str | None:
    """Such as "1a2b3c4", or "1a2b3c4-dirty" when tracked files differ from it.

    `root` is the folder with `.git`, by default the package's parent. None where there is none, as
    for an installed package, and where git is missing or refuses.
    """
    root = Path(vexpert.__file__).parent.parent if root is None else root
    if not (root / ".git").exists():
        return None
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *DESCRIBE],
            capture_output=True, text=True, timeout=20, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
