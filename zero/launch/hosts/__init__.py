"""The hosts there are, those chosen, and the ranks and variables that follow."""
