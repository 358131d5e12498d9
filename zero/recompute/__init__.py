"""Activations that are computed again in backward: what is recomputed, what is kept, and where that rests."""
