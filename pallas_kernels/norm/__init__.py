"""Layer norm and RMS norm, with dropout and a residual sum in the same pass."""

from pallas_kernels.norm.arithmetic import NormRules as NormRules
