"""Products of groups of rows, as of a mixture of experts."""
