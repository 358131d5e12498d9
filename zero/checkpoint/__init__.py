"""What a run needs to go on, as files."""
