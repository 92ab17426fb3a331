"""Seconds and live bytes, of one device: of equations, and of a compiled kernel.

`equations.py` has what an equation takes, and `chosen_kernel.py` what it does where it
is lowered to a kernel; `parts.py` what parts of it do; `roofline.py` what a kernel of a
compiled module does. All read the rates of `chips`.
"""
