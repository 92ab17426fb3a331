"""The step for Flax nnx: (model, optimizer, batch, rng) -> metrics, both in place.

What is no parameter of the optimizer (batch statistics, counters of random streams,
frozen parameters) goes from micro-batch to micro-batch as the model state.
"""

import dataclasses
import functools
from collections.abc import Callable

from flax import nnx

from jaxmem.accumulate._face import Face, next_step
from jaxmem.accumulate._loss import standard_loss, unpack
from jaxmem.accumulate._options import Options
from jaxmem.accumulate._train import train


def nnx_face(loss_fn: Callable, tx, options: Options) -> Face:
    if options.has_model_state:
        raise ValueError(
            "has_model_state=True with an nnx.Module, which holds its own: leave it out"
        )
    inner = dataclasses.replace(options, has_model_state=True)

    def microbatch_step(model, optimizer, batch, rng=None):
        (graphdef, params, rest), (opt_state, step) = model, optimizer
        loss = functools.partial(_loss, loss_fn, options, graphdef)
        loss = standard_loss(loss, inner)
        out = train(loss, tx, inner, params, opt_state, rest, batch, rng)
        new_model = (graphdef, out.params, out.model_state)
        return new_model, (out.opt_state, next_step(step, out.taken)), out.metrics

    return Face(
        microbatch_step,
        (0, 1),
        lambda args: args[1][0],
        lambda out: out[1][0],
        functools.partial(_take_apart, tx),
        _hand_back,
    )


def _loss(loss_fn: Callable, options: Options, graphdef, params, rest, batch, rng):
    """The loss of a model of these parts, and the other part as the loss left it."""
    model = nnx.merge(graphdef, params, rest)
    loss, _, aux = unpack(loss_fn(model, batch, rng), options)
    paths = {path for path, _ in nnx.to_flat_state(params)}
    _, rest = nnx.split_state(nnx.state(model), lambda path, _: path in paths, ...)
    rest = nnx.as_pure(rest)
    return loss, (rest, aux) if options.has_aux else rest


def _take_apart(tx, model, optimizer, *others):
    """Arrays without nnx.Variable round them, as flax's own `update` has them."""
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
    graphdef, params, rest = nnx.split(model, optimizer.wrt, ...)
    state = (optimizer.opt_state, optimizer.step)
    return (graphdef, *nnx.as_pure((params, rest))), nnx.as_pure(state), *others


def _hand_back(args, out):
    model, optimizer = args[:2]
    (_, params, rest), (opt_state, step), metrics = out
    nnx.update(model, params, rest)
    nnx.update(optimizer.opt_state, nnx.state(opt_state))
    optimizer.step.set_value(step)
    return metrics
