"""Decisions as plain values: layout of flat buffers, grouping into units, order, memory.

Nothing here imports torch or talks to another rank, so all of it is tested in milliseconds.
"""
