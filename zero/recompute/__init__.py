"""Activation recomputation: which modules are recomputed, what they keep, and where that rests."""
