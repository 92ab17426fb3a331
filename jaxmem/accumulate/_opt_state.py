"""Whether a state is one of an optimizer for these parameters."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import keystr

from jaxmem._checks import shown
from jaxmem.accumulate._overwritten import take_apart
from jaxmem.optim import accumulates


def check_opt_state(tx, params, opt_state) -> None:
    """An error for a state that is not that of `tx` for these parameters.

    TypeError for one of another structure, ValueError for one of other shapes.
    """
    trained = jax.tree.map(jax.typeof, take_apart(params)[0])
    for path, x in jax.tree.leaves_with_path(trained):
        if not jnp.issubdtype(x.dtype, jnp.inexact) and not accumulates(params):
            raise TypeError(
                f"params{keystr(path)} is {shown(x)}: gradients are taken of floating "
                "arrays; what is not trained goes with has_model_state=True"
            )
    try:
        wanted = jax.eval_shape(tx.init, trained)
    except Exception as error:
        if accumulates(params):
            raise _wrong_state(params, opt_state) from error
        return  # an init that reads values cannot be traced
    if jax.tree.structure(opt_state) != jax.tree.structure(wanted):
        raise _wrong_state(params, opt_state)
    _check_shapes(opt_state, wanted)


def _check_shapes(opt_state: Any, wanted: Any) -> None:
    pairs = zip(
        jax.tree.leaves_with_path(opt_state), jax.tree.leaves(wanted), strict=True
    )
    for (path, x), y in pairs:
        if jnp.shape(x) != y.shape:
            raise ValueError(
                f"opt_state{keystr(path)}={shown(x)}: tx.init(params) gives "
                f"{shown(y)} there; it is the state of parameters of other shapes"
            )


def _wrong_state(params, opt_state) -> TypeError:
    return TypeError(
        f"opt_state={shown(opt_state)} is not of the structure that tx.init(params) "
        f"gives for params={shown(params)}. A step takes (params, opt_state, ...), in "
        "this order; with parameters that their gradient overwrites (Flax's fp8) the "
        "state is that of tx.init(params['params'])"
    )
