"""What only a command of `zero` runs. Nothing but `zero.__main__` imports it: see tests/house/test_floors.py."""
