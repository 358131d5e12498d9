"""Records of a run, one for each step: the log printed of them, and the sinks that they are written to."""
