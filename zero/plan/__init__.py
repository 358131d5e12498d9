"""Decisions as plain values: layout of flat buffers, grouping into units, resharding, order, memory.

Nothing here imports torch or talks to another rank, so all of it is tested in milliseconds.
"""
