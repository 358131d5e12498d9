"""Checkpoints on disk: safetensors files of fragments, and one index that says what lies where."""
