"""What only a command of `zero` runs. Only the command line imports it: see tests/house/test_floors.py."""
