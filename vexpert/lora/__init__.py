"""Adapters: reading files, host weights, slots in device memory, and the layers that add deltas."""
