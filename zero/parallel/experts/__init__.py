"""Experts divided among ranks: which modules have them, which rank has which, and how tokens reach them."""
