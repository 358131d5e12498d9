"""What ranks share besides the data: sequences, so far. Each form is over the units, and never inside them."""
