"""Kernels for GPUs and TPUs; their references in plain XLA are in `jaxmem`.

A folder is a kernel, with a module for each platform: `norm/tpu.py` is written for
Mosaic TPU, `norm/gpu.py` for Mosaic GPU; `chips.py` says which chips they are for.
Kernels are functions of arrays, without a derivative: `jaxmem.ops` puts them under its
`custom_vjp`s, and `dispatch.py` chooses among them by the platform that is lowered for.

A kernel raises `NotImplementedError` for a shape, dtype or option that it does not
support, with what it supports. Nothing here imports `jaxmem`.
"""

from pallas_kernels._compat import simulated as simulated
from pallas_kernels._compat import simulated_platform as simulated_platform
