"""One step in many sizes: bytes and predicted seconds over depth, width, batch, chip.

`combinations.py` compiles them, `result.py` has what it returns: a `swept_step.py` for
each. `plot.py` draws it.
"""

from jaxmem.memory.sweeps.combinations import sweep as sweep
from jaxmem.memory.sweeps.result import Sweep as Sweep
from jaxmem.memory.sweeps.swept_step import SweptStep as SweptStep
