"""A user's call as a function of a flat list of arrays.

`jax.export` serializes few kinds of pytrees, so a call is flattened before lowering.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from jaxmem.frameworks import Call, Form, named_leaves

_HOST_ALONE = NamedSharding(
    AbstractMesh((1,), ("device",), axis_types=(AxisType.Auto,)),
    PartitionSpec(),
    memory_kind="pinned_host",
)


@dataclass(frozen=True)
class Leaf:
    """One array argument of a call."""

    name: str  # the parameter's name and the path inside of it, as `state.params['w']`
    spec: jax.ShapeDtypeStruct  # with its sharding if there are several devices
    donated: bool  # whether the call may reuse its buffer
    key_impl: Any = None  # of a PRNG key, which is passed as the integers it is made of


@dataclass(frozen=True)
class FlatCall:
    """A call with its arguments flattened."""

    name: str  # the function's, fit for a module's name
    leaves: tuple[Leaf, ...]  # the array arguments
    treedef: Any  # of the arguments of the pure function, see `pure_call`
    form: Form  # everything else that the call consists of

    @property
    def shardings(self) -> tuple[Any, ...]:
        """Of each array argument; None for one that has none."""
        return tuple(getattr(leaf.spec, "sharding", None) for leaf in self.leaves)

    def rebuild(self, leaves: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of the pure function with these arrays in them."""
        values = [
            x
            if leaf.key_impl is None
            else jax.random.wrap_key_data(x, impl=leaf.key_impl)
            for x, leaf in zip(leaves, self.leaves, strict=True)
        ]
        return jax.tree.unflatten(self.treedef, values)


def flatten_call(fn: Callable, call: Call) -> FlatCall:
    """Flattens a call of `fn`; it must be open."""
    name = step_name(fn)
    static = {place for place, _ in call.form.static}
    leaves = tuple(
        _leaf(_spec(value, title, name), title, place in call.form.donated)
        for place, title, value in named_leaves(fn, call.args, call.kwargs, static)
    )
    treedef = jax.tree.structure((call.args, call.kwargs))
    return FlatCall(name, leaves, treedef, call.form)


def step_name(fn: Callable) -> str:
    """The function's name, through partials and wrappers; fit for a module's name."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    name = getattr(fn, "__name__", type(fn).__name__)
    return "".join(c if c.isalnum() or c == "_" else "_" for c in name).strip("_")


def _leaf(spec: jax.ShapeDtypeStruct, title: str, donated: bool) -> Leaf:
    if not jax.dtypes.issubdtype(spec.dtype, jax.dtypes.prng_key):
        return Leaf(title, spec, donated)
    impls = []

    def data_of(key):
        impls.append(jax.random.key_impl(key))
        return jax.random.key_data(key)

    data = jax.eval_shape(data_of, jax.ShapeDtypeStruct(spec.shape, spec.dtype))
    data = jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=spec.sharding)
    return Leaf(title, data, donated, impls[0])


def _spec(value: Any, title: str, step: str) -> jax.ShapeDtypeStruct:
    """Shape, dtype, and the sharding if it says more than "on one device"."""
    if not isinstance(value, jax.Array | jax.ShapeDtypeStruct):
        try:
            value = jax.eval_shape(lambda x: x, value)
        except TypeError as error:
            raise TypeError(
                f"{step}: argument {title} is {value!r}, neither an array nor a "
                "jax.ShapeDtypeStruct; name it in static_argnums (or "
                "static_argnames) if the step does not compute with it"
            ) from error
    if not all(isinstance(d, int) for d in value.shape):
        raise ValueError(
            f"{step}: argument {title} has the symbolic shape {value.shape}, and bytes "
            "need numbers: pass an array of the size that is meant"
        )
    sharding = getattr(value, "sharding", None)
    if not isinstance(sharding, NamedSharding) or sharding.mesh.size == 1:
        # an abstract mesh, since devices of a topology know no memories
        sharding = _HOST_ALONE if _is_on_host(value) else None
    return jax.ShapeDtypeStruct(
        value.shape,
        value.dtype,
        sharding=sharding,
        weak_type=getattr(value, "weak_type", False),
    )


def _is_on_host(value: jax.Array | jax.ShapeDtypeStruct) -> bool:
    kind = getattr(getattr(value, "sharding", None), "memory_kind", None)
    space = getattr(jax.typeof(value), "memory_space", None)
    return space == jax.memory.Space.Host or kind == "pinned_host"


def describe_sharding(sharding: NamedSharding | None) -> tuple | None:
    """A sharding as plain data, without its devices: the worker has others."""
    if sharding is None:
        return None
    mesh = sharding.mesh
    spec = tuple(sharding.spec)
    return mesh.axis_sizes, mesh.axis_names, spec, sharding.memory_kind
