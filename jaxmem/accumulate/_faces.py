"""Faces of the step: plain pytrees, Equinox modules among them, a Flax TrainState, and
Flax nnx objects (`_nnx.py`).
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import keystr

from jaxmem._checks import shown
from jaxmem.accumulate._face import Face, next_step
from jaxmem.accumulate._loss import standard_loss
from jaxmem.accumulate._options import Options
from jaxmem.accumulate._overwritten import take_apart
from jaxmem.accumulate._train import train
from jaxmem.frameworks import is_equinox_module, is_nnx_object
from jaxmem.optim import contains_adama


def kind_of(first: Any) -> str:
    """Which face a first argument asks for; no framework is imported to find out."""
    if is_nnx_object(first):
        return "nnx"
    if is_equinox_module(first):
        return "equinox"
    fields = ("apply_gradients", "params", "opt_state", "tx", "step")
    if all(hasattr(first, name) for name in fields):
        return "train_state"
    return "plain"


def make_face(kind: str, loss_fn: Callable, tx, options: Options) -> Face:
    if kind == "nnx":
        from jaxmem.accumulate._nnx import nnx_face

        return nnx_face(loss_fn, tx, options)
    if kind == "train_state":
        return _train_state(loss_fn, tx, options)
    return _plain(loss_fn, tx, options, _float_arrays if kind == "equinox" else _all)


def _all(params):
    """(what is trained, how to make the whole of it)."""
    return params, lambda trained: trained


def _float_arrays(model):
    """The same of an Equinox module, whose other leaves have no gradient."""
    import equinox

    params, rest = equinox.partition(model, equinox.is_inexact_array)
    return params, lambda trained: equinox.combine(trained, rest)


def _plain(loss_fn: Callable, tx, options: Options, split: Callable) -> Face:
    """(params, opt_state, [model_state,] batch, rng), the first ones come back."""

    def update(params, opt_state, model_state, batch, rng):
        trained, whole = split(params)
        check_opt_state(tx, trained, opt_state)
        loss = lambda trained, *args: loss_fn(whole(trained), *args)
        loss = standard_loss(loss, options)
        out = train(loss, tx, options, trained, opt_state, model_state, batch, rng)
        return out._replace(params=whole(out.params))

    def microbatch_step(params, opt_state, batch, rng=None):
        out = update(params, opt_state, None, batch, rng)
        return out.params, out.opt_state, out.metrics

    def microbatch_step_with_state(params, opt_state, model_state, batch, rng=None):
        out = update(params, opt_state, model_state, batch, rng)
        return out.params, out.opt_state, out.model_state, out.metrics

    run, donate = microbatch_step, (0, 1)
    if options.has_model_state:
        run, donate = microbatch_step_with_state, (0, 1, 2)
    return Face(run, donate, lambda args: args[1], lambda args, out: out[1])


def check_opt_state(tx, params, opt_state) -> None:
    """TypeError for what is no state of `tx` for these parameters, as far as seen."""
    trained = jax.tree.map(jax.typeof, take_apart(params)[0])
    for path, x in jax.tree.leaves_with_path(trained):
        if not jnp.issubdtype(x.dtype, jnp.inexact) and not contains_adama(params):
            raise TypeError(
                f"params{keystr(path)} is {shown(x)}: gradients are taken of floating "
                "arrays; what is not trained goes with has_model_state=True"
            )
    try:
        wanted = jax.tree.structure(jax.eval_shape(tx.init, trained))
    except Exception as error:
        if contains_adama(params):
            raise _no_state(params, opt_state) from error
        return  # an init that reads values cannot be traced
    if jax.tree.structure(opt_state) != wanted:
        raise _no_state(params, opt_state)


def _no_state(params, opt_state) -> TypeError:
    return TypeError(
        f"opt_state={shown(opt_state)} is not of the structure that tx.init(params) "
        f"gives for params={shown(params)}. A step takes (params, opt_state, ...), in "
        "this order; with parameters that their gradient overwrites (Flax's fp8) the "
        "state is that of tx.init(params['params'])"
    )


def _train_state(loss_fn: Callable, tx, options: Options) -> Face:
    """(state, batch, rng) -> (state, metrics); a model state is `batch_stats`."""
    core = functools.partial(train, standard_loss(loss_fn, options), tx, options)

    def microbatch_step(state, batch, rng=None):
        _check_train_state(state, tx, options)
        model_state = state.batch_stats if options.has_model_state else None
        out = core(state.params, state.opt_state, model_state, batch, rng)
        new = {"params": out.params, "opt_state": out.opt_state}
        if options.has_model_state:
            new["batch_stats"] = out.model_state
        return state.replace(step=next_step(state.step, out.taken), **new), out.metrics

    return Face(
        microbatch_step,
        (0,),
        lambda args: args[0].opt_state,
        lambda args, out: out[0].opt_state,
    )


def _check_train_state(state, tx, options: Options) -> None:
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
