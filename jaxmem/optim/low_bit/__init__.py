"""Adam with moments in 8 or 4 bits, and bfloat16 weights that do not stand still."""

from jaxmem.optim.low_bit.adam import LowBitAdamState as LowBitAdamState
from jaxmem.optim.low_bit.adam import adam as adam
from jaxmem.optim.low_bit.adam import adamw as adamw
from jaxmem.optim.low_bit.adam import scale_by_adam as scale_by_adam
from jaxmem.optim.low_bit.codes import Codes as Codes
from jaxmem.optim.low_bit.low_bit import LowBit as LowBit
