"""The optimizer on shards: rules that update one unit, the step over all of them, clipping, learning rates."""
