"""Computation in slices, so that the whole never exists: the loss over a large vocabulary, and huge layers."""
