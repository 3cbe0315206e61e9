"""How the process's threads behave; to be set before torch is imported."""

import os


def limit_spinning() -> None:
    """Let OpenMP's threads sleep soon at a barrier; a choice that the environment makes is kept."""
    # By default they spin for milliseconds at each barrier, so that another process on the same
    # cores slows every small operation many times over (seen: 1300 -> 15 tokens/s on 2 shared
    # cores). OpenMP reads this once, when torch loads it.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "20000")
