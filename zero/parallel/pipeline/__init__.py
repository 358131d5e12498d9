"""Layers divided among ranks: stages of a model, and the schedules of torch that run micro-batches through them."""
