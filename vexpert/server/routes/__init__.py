"""Routes, one file per group."""
