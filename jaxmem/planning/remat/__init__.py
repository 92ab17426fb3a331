"""Recomputation under a budget: which operations to repeat, and when.

`budget` has the entry points, `chain` the plans for training steps, `local_search` what
improves any sequence, `exhaustive` and `integer_program` what proves an optimum.
"""
