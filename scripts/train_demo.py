"""Trains the demo model and its adapters, or evaluates them.

    python scripts/train_demo.py --out vexpert/demo
    python scripts/train_demo.py --out vexpert/demo --only sort
    python scripts/train_demo.py --out vexpert/demo --eval 2000

Writes ``OUT/model`` and ``OUT/adapters/NAME``.
"""

import argparse
import time
from pathlib import Path

import torch
from demo.recipes import MAX_POSITIONS, RECIPES
from demo.tasks import TASKS, held_out_words
from demo.tokenizer import build_tokenizer
from demo.training import exact_match, load_base, train_adapter, train_base
from peft import PeftModel
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

EVALUATION_SEED = 2


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", type=Path, default=Path("vexpert/demo"), help="folder to write (or evaluate)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--only", choices=list(RECIPES), action="append", help="this part only; may be repeated"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--eval", type=int, metavar="WORDS", help="no training: exact match on WORDS unseen words"
    )
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="for --eval"
    )
    return parser.parse_args()


def train_parts(names: list[str], out: Path, tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
    for name in names:
        started = time.monotonic()
        if name == "base":
            train_base(out / "model", tokenizer, seed)
        else:
            train_adapter(name, out / "model", out / "adapters" / name, tokenizer, seed)
        print(f"{name}: {time.monotonic() - started:.0f} s in all", flush=True)


def evaluate_parts(names: list[str], out: Path, count: int, dtype: torch.dtype) -> None:
    """Loads each part afresh, as a user would, and prints its exact match."""
    tokenizer = AutoTokenizer.from_pretrained(out / "model")
    words = held_out_words(count, EVALUATION_SEED)
    for name in names:
        model = load_base(out / "model", dtype)
        if name != "base":
            model = PeftModel.from_pretrained(model, str(out / "adapters" / name)).eval()
        rate = exact_match(model, tokenizer, TASKS[name], words)
        print(f"{name:8} {rate * 100:6.2f}% exact on {count} unseen words ({dtype})", flush=True)


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    disable_progress_bar()
    names = arguments.only or list(RECIPES)
    if arguments.eval is not None:
        evaluate_parts(names, arguments.out, arguments.eval, getattr(torch, arguments.dtype))
    else:
        train_parts(names, arguments.out, build_tokenizer(MAX_POSITIONS), arguments.seed)


if __name__ == "__main__":
    main()
