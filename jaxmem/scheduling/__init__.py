"""Scheduling a train step: its jaxpr rewritten so that less is alive at the peak."""

from jaxmem.scheduling._budget import BudgetError as BudgetError
from jaxmem.scheduling._choice import Choice as Choice
from jaxmem.scheduling._plan import Again as Again
from jaxmem.scheduling._plan import Compiled as Compiled
from jaxmem.scheduling._plan import Gradient as Gradient
from jaxmem.scheduling._plan import Plan as Plan
from jaxmem.scheduling._plan import Remade as Remade
from jaxmem.scheduling._schedule import Scheduled as Scheduled
from jaxmem.scheduling._schedule import schedule as schedule
