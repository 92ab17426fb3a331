"""Variables that keep jax from complaining of chips that are absent.

They are set only where there is no such hardware, and never over the user's own.
"""

import glob
import os
from collections.abc import MutableMapping

_NO_GPU = {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
_NO_TPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
}
NO_HARDWARE = _NO_GPU | _NO_TPU
_GPU_FILES = ("/dev/nvidia*", "/dev/dxg")
_TPU_FILES = ("/dev/accel*", "/dev/vfio/*")


def silence_absent_hardware(environment: MutableMapping[str, str] = os.environ) -> None:
    """Sets the variables for the hardware that this machine does not have."""
    for variables, files in ((_NO_GPU, _GPU_FILES), (_NO_TPU, _TPU_FILES)):
        if any(glob.glob(pattern) for pattern in files):
            continue
        for name, value in variables.items():
            environment.setdefault(name, value)
