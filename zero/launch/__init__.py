"""Starting one process per rank. Nothing here imports torch before a process is about to start."""
