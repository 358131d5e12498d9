"""Reports of a run: one value per step, and the sinks that it is written to."""
