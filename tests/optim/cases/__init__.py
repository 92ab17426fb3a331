"""Cases of the battery of optimizers (`tests/optim/test_battery.py`), a file a family.

Each module has `CASES`, a list of `Case`.
"""
