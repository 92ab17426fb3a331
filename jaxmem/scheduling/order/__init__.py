"""The order of operations outside of loops, and the barriers that keep it."""
