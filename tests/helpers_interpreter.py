"""Triton's interpreter without work that takes time and has no effect.

It swaps the functions of `triton.language` for its own before each launch, and again, to no effect,
at every call of one device function by another.
"""

import functools
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def make_quick() -> None:
    """For this process."""
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
