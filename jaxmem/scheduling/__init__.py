"""Scheduling a train step: its jaxpr rewritten so that less is alive at the peak."""

from jaxmem.scheduling._arena import Places as Places
from jaxmem.scheduling._arena import places_of as places_of
from jaxmem.scheduling._arena import run_in_arena as run_in_arena
from jaxmem.scheduling._budget import BudgetError as BudgetError
from jaxmem.scheduling._budget import Compiled as Compiled
from jaxmem.scheduling._choice import Choice as Choice
from jaxmem.scheduling._operations import Operations as Operations
from jaxmem.scheduling._operations import operations_of as operations_of
from jaxmem.scheduling._operations_order import fences_of as fences_of
from jaxmem.scheduling._operations_order import in_given_order as in_given_order
from jaxmem.scheduling._operations_predict import Prediction as Prediction
from jaxmem.scheduling._operations_predict import predict as predict
from jaxmem.scheduling._plan import Again as Again
from jaxmem.scheduling._plan import Gradient as Gradient
from jaxmem.scheduling._plan import Plan as Plan
from jaxmem.scheduling._plan import Remade as Remade
from jaxmem.scheduling._remat_policy import RematPolicy as RematPolicy
from jaxmem.scheduling._remat_policy import remat_policy as remat_policy
from jaxmem.scheduling._schedule import Scheduled as Scheduled
from jaxmem.scheduling._schedule import schedule as schedule
