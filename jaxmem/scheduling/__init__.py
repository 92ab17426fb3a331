"""Scheduling a train step: its jaxpr rewritten so that less is alive at the peak."""

from jaxmem.scheduling._choice import Choice as Choice
from jaxmem.scheduling._remat_policy import RematPolicy as RematPolicy
from jaxmem.scheduling._remat_policy import remat_policy as remat_policy
from jaxmem.scheduling._schedule import schedule as schedule
from jaxmem.scheduling._scheduled import Scheduled as Scheduled
from jaxmem.scheduling.order.given import fences_of as fences_of
from jaxmem.scheduling.order.given import in_given_order as in_given_order
from jaxmem.scheduling.plan.plan import Plan as Plan
from jaxmem.scheduling.plan.rows import Gradient as Gradient
from jaxmem.scheduling.plan.rows import RecomputedOperation as RecomputedOperation
from jaxmem.scheduling.plan.rows import RecomputedResidual as RecomputedResidual
from jaxmem.scheduling.plan.rows import TiledRegion as TiledRegion
from jaxmem.scheduling.predict.operations import Operations as Operations
from jaxmem.scheduling.predict.operations import operations_of as operations_of
from jaxmem.scheduling.predict.prediction import Prediction as Prediction
from jaxmem.scheduling.predict.prediction import predict as predict
from jaxmem.scheduling.search.result import BudgetError as BudgetError
from jaxmem.scheduling.search.result import Trial as Trial

__all__ = [
    "BudgetError",
    "Plan",
    "operations_of",
    "predict",
    "remat_policy",
    "schedule",
]
