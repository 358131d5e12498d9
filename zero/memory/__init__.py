"""Where state rests: device memory, one slab of host memory, a file; and how it comes and goes beside the program."""
