"""Schedule-free learning: an average of the weights in place of a decaying rate."""

from jaxmem.optim.averaged.adamw import RmsState as RmsState
from jaxmem.optim.averaged.adamw import schedule_free_adamw as schedule_free_adamw
from jaxmem.optim.averaged.eval_params import (
    schedule_free_eval_params as schedule_free_eval_params,
)
from jaxmem.optim.averaged.schedule_free import ScheduleFreeState as ScheduleFreeState
from jaxmem.optim.averaged.schedule_free import schedule_free as schedule_free
