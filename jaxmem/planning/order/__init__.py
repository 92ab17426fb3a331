"""The order of operations with the fewest bytes alive at the peak.

`search` has the entry point, `greedy` the orders that compilers choose from, `exact`
the search that proves the optimum of some dozens of operations.
"""
