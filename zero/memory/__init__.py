"""Offload: state rests in device memory, host memory or a file, and is read and written while the program computes."""
