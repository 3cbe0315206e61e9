"""Transformers models with our attention, experts and Linear swapped in."""
