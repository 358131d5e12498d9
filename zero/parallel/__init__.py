"""Sequences, layers, experts and stages that ranks share: each form is over the units, and never inside them."""
