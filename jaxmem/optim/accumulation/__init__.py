"""The interface between optimizers and gradient accumulation.

An optimizer that takes a gradient into its own state as soon as the gradient exists
needs no gradient accumulator. It joins `jaxmem.microbatch`, `jaxmem.schedule` and
`jaxmem.optim.MultiSteps` in two steps: its state is a NamedTuple that
`accumulating_state` registers, and its transformation comes from
`accumulating_transformation`. `jaxmem.optim.adama` is the example.
"""

from jaxmem.optim.accumulation.dependence import dependent_paths as dependent_paths
from jaxmem.optim.accumulation.devices import axis_text as axis_text
from jaxmem.optim.accumulation.devices import count_devices as count_devices
from jaxmem.optim.accumulation.devices import per_device as per_device
from jaxmem.optim.accumulation.dtypes import accumulation_dtype as accumulation_dtype
from jaxmem.optim.accumulation.states import accumulates as accumulates
from jaxmem.optim.accumulation.states import accumulating_state as accumulating_state
from jaxmem.optim.accumulation.states import check_position as check_position
from jaxmem.optim.accumulation.states import counters as counters
from jaxmem.optim.accumulation.states import is_accumulating as is_accumulating
from jaxmem.optim.accumulation.states import map_accumulating as map_accumulating
from jaxmem.optim.accumulation.states import per_device_fields as per_device_fields
from jaxmem.optim.accumulation.steps import accumulate_step as accumulate_step
from jaxmem.optim.accumulation.steps import apply_step as apply_step
from jaxmem.optim.accumulation.steps import start_step as start_step
from jaxmem.optim.accumulation.transformation import (
    accumulating_transformation as accumulating_transformation,
)
from jaxmem.optim.accumulation.transformation import chain_after as chain_after

# What users call; the other packages of the library read the rest.
__all__ = [
    "accumulating_state",
    "accumulating_transformation",
]
