"""Triton kernels: one file each with formula, index tables, kernel, launcher and reference."""
