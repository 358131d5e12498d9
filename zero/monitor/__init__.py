"""What a run tells of itself while it goes on: one value per step, and the sinks that it is written to."""
