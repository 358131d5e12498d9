"""What `zero.Init` does: cuts parameters while their model is built."""
