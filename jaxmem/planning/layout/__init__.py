"""Offsets for buffers in one arena, and the buffers themselves.

`search` has the entry points, `lifetimes` makes buffers of an order of operations,
`fit` is the best fit that XLA uses, `exact` the search that proves a height.
"""
