"""`jaxmem.nn.nnx.Reversible`: a stack of reversible blocks of two modules."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import nnx

from jaxmem._checks import check_callable, check_dtype, check_int
from jaxmem.nn._reversible import Pair, reversible


class Reversible(nnx.Module):
    """A stack of reversible blocks, `jaxmem.nn.reversible` of two modules.

    The modules are made once for each layer; `f` and `g` of the stack hold them with
    the layers along axis 0 of their variables, as `nnx.vmap` makes them.

    Args:
        f: makes a module of `nnx.Rngs`, such as
            `lambda rngs: nnx.Linear(8, 8, rngs=rngs)`; the module takes a stream to an
            array of its shape.
        g: likewise.
        length: layers.
        rngs: of which each layer gets its own; keyword-only, as all that follow.
        stream_dtype: as for `jaxmem.nn.reversible`.
        transform_metadata: as for `nnx.vmap`, for parameters with sharding.

    Raises:
        TypeError: f or g is no function, x no pair of floating arrays.
        ValueError: `length` below 1, an output of another shape than its stream, or a
            module that updates a variable.

    Saves:
        The output, two arrays in `stream_dtype`, for all layers together.

    Limits:
        Modules run twice, so they may not update variables, as a batch norm in training
        does. Random streams are no such variables: each call has other keys, and the
        backward pass those of its forward pass.
    """

    def __init__(
        self,
        f: Callable[[nnx.Rngs], nnx.Module],
        g: Callable[[nnx.Rngs], nnx.Module],
        length: int,
        *,
        rngs: nnx.Rngs,
        stream_dtype: Any = None,
        transform_metadata: Mapping[str, Any] | None = None,
    ):
        allowed = "a function from nnx.Rngs to a module"
        check_callable("Reversible: f", f, allowed)
        check_callable("Reversible: g", g, allowed)
        check_int("Reversible: length", length, 1)
        if stream_dtype is not None:
            check_dtype("Reversible: stream_dtype", stream_dtype)
        how: dict[str, Any] = {"transform_metadata": dict(transform_metadata or {})}
        each = nnx.split_rngs(splits=length)
        self.f, self.g = (each(nnx.vmap(make, **how))(rngs) for make in (f, g))
        self.stream_dtype = stream_dtype

    def __call__(self, x: Pair, *args: Any, **kwargs: Any) -> Pair:
        """Both streams through all layers; f and g get a stream and the arguments."""
        runs, layers = zip(
            *(_branch(n, m, args, kwargs) for n, m in (("f", self.f), ("g", self.g))),
            strict=True,
        )
        return reversible(*runs, stream_dtype=self.stream_dtype)(x, layers)


def _branch(name: str, module: nnx.Module, args, kwargs) -> tuple[Callable, nnx.State]:
    """A module as a function of a stream and a layer, and what layers have."""
    definition, state = nnx.split(_with_keys_of_this_call(module))

    def run(x, layer):
        merged = nnx.merge(definition, layer, copy=True)
        out = merged(x, *args, **kwargs)
        _check_unchanged(name, layer, nnx.state(merged))
        return out

    return run, state


def _with_keys_of_this_call(module: nnx.Module) -> nnx.Module:
    """A copy whose random streams start afresh, from keys of their counts.

    The counts of the module itself go on by one: however many keys a layer draws, those
    of the next call are others.
    """
    copy = nnx.clone(module)
    for own, stream in zip(_streams(module), _streams(copy), strict=True):
        stream.key[...] = jax.vmap(jax.random.fold_in)(own.key[...], own.count[...])
        stream.count[...] = jax.numpy.zeros_like(own.count[...])
        own.count[...] += 1
    return copy


def _streams(module: nnx.Module) -> list[nnx.RngStream]:
    found = (node for _, node in nnx.iter_graph(module))
    return [node for node in found if isinstance(node, nnx.RngStream)]


def _check_unchanged(name: str, before: nnx.State, after: nnx.State) -> None:
    known: dict[Any, Any] = dict(nnx.to_flat_state(before))
    for path, variable in nnx.to_flat_state(after):
        if isinstance(variable, nnx.RngState):
            continue
        if path not in known or variable[...] is not known[path][...]:
            raise ValueError(
                f"Reversible: {name} updates {'/'.join(map(str, path))}: modules run "
                "twice and may not update variables; use a norm without averages"
            )
