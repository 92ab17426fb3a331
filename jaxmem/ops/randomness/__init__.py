"""Random bits from a counter, and dropout, whose mask is recomputed from a key."""
