"""Who waits for whom: each rank tells the others through the store what it does, so that a hang gets names."""
