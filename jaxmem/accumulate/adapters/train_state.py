"""The step for a Flax TrainState: (state, batch, rng) -> (state, metrics)."""

import functools
from collections.abc import Callable

from jaxmem.accumulate._mini_batch import run_mini_batch
from jaxmem.accumulate._options import StepOptions
from jaxmem.accumulate.adapters.adapter import Adapter, next_step, standard_loss
from jaxmem.accumulate.adapters.opt_state import check_opt_state


def train_state_adapter(loss_fn: Callable, tx, options: StepOptions) -> Adapter:
    """The model state, if there is one, is the field `batch_stats`."""
    loss = standard_loss(loss_fn, options)
    run = functools.partial(run_mini_batch, loss, tx, options)

    def microbatch_step(state, batch, rng=None):
        _check_state(state, tx, options)
        check_opt_state(tx, state.params, state.opt_state)
        model_state = state.batch_stats if options.has_model_state else None
        out = run(state.params, state.opt_state, model_state, batch, rng)
        new = {"params": out.params, "opt_state": out.opt_state}
        if options.has_model_state:
            new["batch_stats"] = out.model_state
        step = next_step(state.step, out.updated)
        return state.replace(step=step, **new), out.metrics

    return Adapter(
        microbatch_step,
        donate=(0,),
        state_in=lambda args: args[0].opt_state,
        state_out=lambda args, out: out[0].opt_state,
    )


def _check_state(state, tx, options: StepOptions) -> None:
    if state.tx != tx:
        raise ValueError(
            "tx is not the TrainState's own transformation: pass microbatch(loss_fn, "
            "state.tx, n)"
        )
    if options.has_model_state and not hasattr(state, "batch_stats"):
        raise ValueError(
            "has_model_state=True needs a TrainState with a field batch_stats, "
            f"{type(state).__name__} has none"
        )
