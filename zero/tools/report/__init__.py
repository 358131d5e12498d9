"""`zero report`: what this machine has and how fast it is; and, as an HTML page, what a run has written."""
