"""Checkpoints out of engines and into them; what lies on the disk is `zero.checkpoint`."""
