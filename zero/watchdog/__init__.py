"""Which rank waits for which: each rank reports its activity through the store, so that a hang can be explained."""
