"""Seconds and live bytes, of one device: of equations, and of a compiled kernel.

`equations.py` has what an equation takes, `parts.py` what parts of it do, `roofline.py`
what a kernel of a compiled module does; all read the rates of `chips`.
"""
