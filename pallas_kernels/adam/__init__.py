"""Adam's update, in place: see `reference.py` for what the kernels compute."""

from pallas_kernels.adam.reference import Factors as Factors
from pallas_kernels.adam.reference import update_leaf as update_leaf
from pallas_kernels.adam.reference import uses_bits as uses_bits
