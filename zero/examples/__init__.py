"""Short programs to read; tests compare the engine with them."""
