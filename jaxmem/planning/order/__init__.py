"""The order of operations with the fewest bytes alive at the peak."""
