"""Formats of adapter files, one file each: tensors of the file -> canonical factors."""
