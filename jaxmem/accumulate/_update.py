"""The update of one mini-batch, of what the framework of a model has split it into."""

from collections.abc import Callable
from typing import Any

from jaxmem.accumulate._loss import loss_of
from jaxmem.accumulate._mini_batch import MiniBatchResult, run_mini_batch
from jaxmem.accumulate._opt_state import check_opt_state
from jaxmem.accumulate._options import StepOptions
from jaxmem.frameworks import Held


def update_of(loss_fn: Callable, tx: Any, options: StepOptions) -> Callable:
    """As `Framework.step_form` takes it."""

    def update(
        held: Held, opt_state: Any, model_state: Any, batch: Any, rng: Any
    ) -> MiniBatchResult:
        check_opt_state(tx, held.params, opt_state)
        loss, inner = loss_of(held, loss_fn, options)
        state = model_state if held.state_of is None else held.state
        return run_mini_batch(
            loss, tx, inner, held.params, opt_state, state, batch, rng
        )

    return update
