"""Triton kernels: one file each with formula, index tables, kernel, launcher and reference.

In their tables and docstrings `float` is float16, bfloat16 or float32, the same for all arrays of
a launch that say no more. Sizes, strides and places are elements. `pdl`, of many launchers: the
launch may start before the one in front of it has ended, see `common.pdl_wait`.
"""
