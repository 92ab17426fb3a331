"""A plan that was made before, for the same step."""

import jax

from jaxmem.scheduling.plan.plan import Plan
from jaxmem.scheduling.search.result import SearchResult


def loaded(plan: Plan, fingerprint: str) -> SearchResult:
    """The choice of a plan that was made for the step of this fingerprint.

    Raises:
      ValueError: it was made for another step, or with another jax.
    """
    if plan.jax_version != jax.__version__:
        raise ValueError(
            f"plan: made with jax {plan.jax_version or 'unknown'}, this is jax "
            f"{jax.__version__}, which may trace and compile the step otherwise: plan "
            "again"
        )
    if plan.fingerprint != fingerprint:
        raise ValueError(
            f"plan: made for another step ({plan.fingerprint or 'unknown'}) than this "
            f"one ({fingerprint}): for other operations, shapes, types, donated "
            "arguments or another clip: plan again"
        )
    return SearchResult(plan.choice, plan.budget, fingerprint=fingerprint)
