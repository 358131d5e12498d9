"""Kernels: checked Python functions over the compiled ones, each beside its reference in plain torch."""
