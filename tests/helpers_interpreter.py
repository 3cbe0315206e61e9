"""Triton's interpreter without what takes half of its time and tells these tests nothing.

- It swaps the functions of `triton.language` for its own before each launch, and again, to no
  effect, at every call of one device function by another.
- It computes every sum and product of 32-bit integers a second time in 64 bits, to tell overflows.
  Shapes here are far too small for one; offsets beyond 2^31 are a test of the GPU's.
"""

import dataclasses
import functools
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def make_quick() -> None:
    """For this process."""
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    prepare, restore = interpreter._patch_lang, interpreter._LangPatchScope.restore
    done: set[str] = set()  # modules that the launch that runs has prepared

    @functools.cache
    def modules_of(fn: Any) -> frozenset[str]:
        seen = [value for value in fn.__globals__.values() if value is tl or value is tl.core]
        return frozenset(module.__name__ for module in seen)

    def prepare_once(fn: Any) -> Any:
        if modules_of(fn) and modules_of(fn) <= done:
            return interpreter._LangPatchScope()
        done.update(modules_of(fn))
        return prepare(fn)

    def restore_and_forget(scope: Any) -> None:
        done.clear()
        restore(scope)

    interpreter._patch_lang = prepare_once
    interpreter._LangPatchScope.restore = restore_and_forget
