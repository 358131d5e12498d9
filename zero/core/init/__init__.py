"""Parameters sharded while their model is built, as under `zero.Init`."""
