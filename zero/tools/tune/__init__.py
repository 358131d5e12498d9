"""`zero tune`: the fastest configuration of a script, foretold and then tried."""
