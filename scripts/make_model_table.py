"""Writes docs/models.md: which architectures of the installed transformers are served."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from helpers_model_table import TABLE, make_table

if __name__ == "__main__":
    TABLE.write_text(make_table())
    print(f"wrote {TABLE}")
