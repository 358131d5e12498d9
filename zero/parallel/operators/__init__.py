"""Operators cut by hand: how many pieces each dim of their tensors is cut in, and what moves between two of them."""
