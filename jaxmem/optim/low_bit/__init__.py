"""Moments in 8 or 4 bits, and bfloat16 weights that do not stand still."""

from jaxmem.optim.low_bit.adam import LowBitAdamState as LowBitAdamState
from jaxmem.optim.low_bit.adam import adam as adam
from jaxmem.optim.low_bit.adam import adamw as adamw
from jaxmem.optim.low_bit.adam import scale_by_adam as scale_by_adam
from jaxmem.optim.low_bit.choosing import choose_codes as choose_codes
from jaxmem.optim.low_bit.chosen import ChosenCodes as ChosenCodes
from jaxmem.optim.low_bit.chosen import LeafCode as LeafCode
from jaxmem.optim.low_bit.codes import MomentCodes as MomentCodes
from jaxmem.optim.low_bit.kahan import KahanState as KahanState
from jaxmem.optim.low_bit.kahan import kahan_summation as kahan_summation
from jaxmem.optim.low_bit.lion import LionState as LionState
from jaxmem.optim.low_bit.lion import lion as lion
from jaxmem.optim.low_bit.lion import scale_by_lion as scale_by_lion
from jaxmem.optim.low_bit.low_bit import LowBit as LowBit
from jaxmem.optim.low_bit.split_master import SplitMasterState as SplitMasterState
from jaxmem.optim.low_bit.split_master import split_master as split_master
from jaxmem.optim.low_bit.stochastic_rounding import (
    StochasticRoundingState as StochasticRoundingState,
)
from jaxmem.optim.low_bit.stochastic_rounding import (
    stochastic_rounding as stochastic_rounding,
)
