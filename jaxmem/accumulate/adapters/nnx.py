"""The step for Flax nnx: (model, optimizer, batch, rng) -> metrics.

It updates the model and the optimizer in place. The Variables that the optimizer does
not train (batch statistics, counters of random streams, frozen parameters) are the
model state, which goes from micro-batch to micro-batch.
"""

import dataclasses
import functools
from collections.abc import Callable

from flax import nnx

from jaxmem.accumulate._mini_batch import run_mini_batch
from jaxmem.accumulate._options import StepOptions
from jaxmem.accumulate.adapters.adapter import Adapter, next_step, standard_loss, unpack
from jaxmem.accumulate.adapters.opt_state import check_opt_state


def nnx_adapter(loss_fn: Callable, tx, options: StepOptions) -> Adapter:
    """A step that updates its objects; `schedule` carries them."""
    if options.has_model_state:
        raise ValueError(
            "has_model_state=True with an nnx.Module, which holds its own: leave it out"
        )
    inner = dataclasses.replace(options, has_model_state=True)

    def microbatch_step(model, optimizer, batch, rng=None):
        _check_optimizer(tx, optimizer)
        graphdef, *states = nnx.split(model, optimizer.wrt, ...)
        params, rest = nnx.as_pure(states)  # without Variables: as optax has them
        opt_state, step = nnx.as_pure((optimizer.opt_state, optimizer.step))
        check_opt_state(tx, params, opt_state)
        loss = functools.partial(_loss, loss_fn, options, graphdef)
        loss = standard_loss(loss, inner)
        out = run_mini_batch(loss, tx, inner, params, opt_state, rest, batch, rng)
        nnx.update(model, out.params, out.model_state)
        nnx.update(optimizer.opt_state, nnx.state(out.opt_state))
        optimizer.step.set_value(next_step(step, out.updated))
        return out.metrics

    def check(args):
        _check_optimizer(tx, args[1])

    def state(args, out=None):
        return nnx.as_pure(args[1].opt_state)

    return Adapter(microbatch_step, (0, 1), state, state, check)


def _loss(loss_fn: Callable, options: StepOptions, graphdef, params, rest, batch, rng):
    """The loss of a model of these states, and its other state after the loss."""
    model = nnx.merge(graphdef, params, rest)
    loss, _, aux = unpack(loss_fn(model, batch, rng), options)
    paths = {path for path, _ in nnx.to_flat_state(params)}
    _, rest = nnx.split_state(nnx.state(model), lambda path, _: path in paths, ...)
    rest = nnx.as_pure(rest)
    return loss, (rest, aux) if options.has_aux else rest


def _check_optimizer(tx, optimizer) -> None:
    if not isinstance(optimizer, nnx.Optimizer):
        raise TypeError(
            "the second argument after an nnx.Module is its nnx.Optimizer, got "
            f"{type(optimizer).__name__}"
        )
    if optimizer.tx != tx:
        raise ValueError(
            "tx is not the nnx.Optimizer's own transformation: pass "
            "microbatch(loss_fn, optimizer.tx, n)"
        )
