"""GELU, SiLU and their gated units: see `reference.py` for what kernels compute."""
