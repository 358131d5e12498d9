"""The trust check: a few steps under every stage against plain torch, and a table of the differences."""
