"""Scheduling a train step: its jaxpr rewritten so that less is alive at the peak."""

from jaxmem.scheduling._plan import Gradient as Gradient
from jaxmem.scheduling._plan import Plan as Plan
from jaxmem.scheduling._plan import Remade as Remade
from jaxmem.scheduling._schedule import Scheduled as Scheduled
from jaxmem.scheduling._schedule import schedule as schedule
