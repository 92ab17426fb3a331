"""The step for plain pytrees, Equinox modules among them.

It takes (params, opt_state, [model_state,] batch, rng) and returns the first ones.
"""

from collections.abc import Callable

from jaxmem.accumulate._mini_batch import run_mini_batch
from jaxmem.accumulate._options import StepOptions
from jaxmem.accumulate.adapters.adapter import Adapter, standard_loss
from jaxmem.accumulate.adapters.opt_state import check_opt_state


def plain_adapter(loss_fn: Callable, tx, options: StepOptions) -> Adapter:
    """The whole tree of parameters is trained."""
    return _adapter(loss_fn, tx, options, lambda params: (params, lambda new: new))


def equinox_adapter(loss_fn: Callable, tx, options: StepOptions) -> Adapter:
    """The floating arrays of a module are trained; other leaves have no gradient."""
    import equinox

    def split(model):
        params, rest = equinox.partition(model, equinox.is_inexact_array)
        return params, lambda new: equinox.combine(new, rest)

    return _adapter(loss_fn, tx, options, split)


def _adapter(loss_fn: Callable, tx, options: StepOptions, split: Callable) -> Adapter:
    """`split` gives the trained tree, and a function that makes the whole of it."""

    def update(params, opt_state, model_state, batch, rng):
        trained, merge = split(params)
        check_opt_state(tx, trained, opt_state)
        loss = lambda trained, *args: loss_fn(merge(trained), *args)
        loss = standard_loss(loss, options)
        out = run_mini_batch(
            loss, tx, options, trained, opt_state, model_state, batch, rng
        )
        return out._replace(params=merge(out.params))

    def microbatch_step(params, opt_state, batch, rng=None):
        out = update(params, opt_state, None, batch, rng)
        return out.params, out.opt_state, out.metrics

    def microbatch_step_with_state(params, opt_state, model_state, batch, rng=None):
        out = update(params, opt_state, model_state, batch, rng)
        return out.params, out.opt_state, out.model_state, out.metrics

    run, donate = microbatch_step, (0, 1)
    if options.has_model_state:
        run, donate = microbatch_step_with_state, (0, 1, 2)
    return Adapter(run, donate, lambda args: args[1], lambda args, out: out[1])
