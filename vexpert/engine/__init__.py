"""Scheduler, paged KV cache, sampler and the step loop; the Python API."""
