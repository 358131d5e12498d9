"""Offload: where state rests, in device memory, host memory or a file, and how it is read and written meanwhile."""
