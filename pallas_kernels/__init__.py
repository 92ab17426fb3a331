"""Kernels for GPUs and TPUs, each beside its plain XLA twin in `jaxmem`.

A file is a kernel and a platform: `norm_tpu.py` is written for Mosaic TPU,
`norm_gpu.py` for Mosaic GPU (compute capability 9.0 and later). Kernels are functions
of arrays, without a derivative: `jaxmem.ops` puts them under its `custom_vjp`s, and
`dispatch.py` chooses among them by the platform that is lowered for.

A kernel raises `NotImplementedError` for a shape, dtype or option that it does not do,
and says what it does. Nothing here imports `jaxmem`.
"""

from pallas_kernels._compat import simulated as simulated
