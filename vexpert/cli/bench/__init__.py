"""`vexpert bench`."""
