"""Second moments that are factored or shared, and optimizers without moments.

`came`, `adafactor` and `adalomo` keep means of rows and columns, `sm3` maxima, and
`adam_mini` one number a block; `lomo` keeps nothing. All take the layers of a stacked
leaf one by one, so that `jaxmem.schedule` can update them in the backward pass.
"""

from jaxmem.optim.factored.adafactor import adafactor as adafactor
from jaxmem.optim.factored.adam_mini import AdamMiniState as AdamMiniState
from jaxmem.optim.factored.adam_mini import adam_mini as adam_mini
from jaxmem.optim.factored.adam_mini import scale_by_adam_mini as scale_by_adam_mini
from jaxmem.optim.factored.came import CameState as CameState
from jaxmem.optim.factored.came import came as came
from jaxmem.optim.factored.came import scale_by_came as scale_by_came
from jaxmem.optim.factored.factored_rms import FactoredRmsState as FactoredRmsState
from jaxmem.optim.factored.factored_rms import (
    scale_by_factored_rms as scale_by_factored_rms,
)
from jaxmem.optim.factored.lomo import adalomo as adalomo
from jaxmem.optim.factored.lomo import lomo as lomo
from jaxmem.optim.factored.moments import FactoredMoment as FactoredMoment
from jaxmem.optim.factored.sm3 import Sm3State as Sm3State
from jaxmem.optim.factored.sm3 import scale_by_sm3 as scale_by_sm3
from jaxmem.optim.factored.sm3 import sm3 as sm3
