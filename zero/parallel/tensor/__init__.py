"""Layers cut over tensor-parallel ranks."""
