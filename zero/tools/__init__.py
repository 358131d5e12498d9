"""What only a command of `zero` runs. Nothing outside imports it, but on use: see tests/house/test_floors.py."""
