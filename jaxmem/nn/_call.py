"""The call of a model as a function of arrays, its parameters first."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from jaxmem.nn._traced import split_arrays


def of_arrays(fn: Callable, args, kwargs) -> tuple[Callable, list[Any]]:
    """The call as a function of its arrays alone, and these."""
    # A `jax.ShapeDtypeStruct` too.
    is_array = lambda leaf: hasattr(leaf, "dtype")
    arrays, rebuild = split_arrays((args, kwargs), is_array)

    def call(arrays):
        args, kwargs = rebuild(arrays)
        return fn(*args, **kwargs)

    return call, arrays


def linen_call(model, args, rngs, kwargs) -> tuple[Callable, tuple]:
    """The call as a function of the parameters first, and the arguments for that."""
    rngs = rngs or {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    init, arrays = of_arrays(functools.partial(model.init, rngs), args, kwargs)
    variables = dict(jax.eval_shape(init, arrays))

    def run(variables, *args, **kwargs):
        return model.apply(variables, *args, rngs=rngs, mutable=True, **kwargs)[0]

    def apply(params, rest, arrays):
        variables = {"params": params, **rest}
        call, _ = of_arrays(functools.partial(run, variables), args, kwargs)
        return call(arrays)

    return apply, (variables.pop("params", {}), variables, arrays)


def nnx_call(model, args, rngs, kwargs) -> tuple[Callable, tuple]:
    """The same of an nnx model, whose own state stays as it is."""
    del rngs  # a model has its own
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def run(params, rest, arrays):
        mine = nnx.merge(graph, params, rest, copy=True)
        call, _ = of_arrays(mine, args, kwargs)
        return call(arrays)

    return run, (params, rest, of_arrays(model, args, kwargs)[1])
