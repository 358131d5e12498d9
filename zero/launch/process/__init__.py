"""Child processes that run at the same time: their output, their stdin, their end."""
