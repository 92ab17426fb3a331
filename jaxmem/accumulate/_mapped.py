"""A mini-batch mapped over axes of a mesh, in a step that XLA partitions.

Under `jit` XLA reduces the gradient of every micro-batch over the devices. Where the
mini-batch is a `jax.shard_map` over the axes of the batch, the other axes of the mesh
left to XLA, each device sums its own and they are reduced once.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import keystr

from jaxmem import _compat
from jaxmem.accumulate._options import StepOptions
from jaxmem.accumulate._trees import split_batch
from jaxmem.accumulate._whole_batch import tell_of_examples_together
from jaxmem.ir import jaxprs, primitives
from jaxmem.optim.accumulation import axis_text


def mapped(
    run: Callable, loss_fn: Callable, options: StepOptions, *state_and_batch: Any
) -> Any:
    """`run(loss_fn, params, opt_state, model_state, batch, rng)` on each device.

    Args:
      run: a mini-batch in a `shard_map` over `options.axis_name`.
      loss_fn: of `adapters.loss.standard_loss`; what it says of the sharding of values
        holds for the other axes.
      options: with a mesh.
      *state_and_batch: (params, opt_state, model_state, batch, rng) of all devices.
    """
    assert options.mesh is not None
    params, _, model_state, batch, rng = state_and_batch
    axes = options.axis_name
    count = math.prod(options.mesh.shape[name] for name in axes)
    _check_batch(batch, count, options)
    tell_of_examples_together(loss_fn, options, params, model_state, batch, rng)
    examples = _micro_batch(batch, count * options.n)
    own = _without_axes(loss_fn, axes, params, model_state, examples, rng)
    rows, same = PartitionSpec(axes), PartitionSpec()
    return jax.shard_map(
        lambda *args: run(own, *args),
        mesh=options.mesh,
        in_specs=(same, same, same, rows, same),
        out_specs=same,
        axis_names={*axes},
        # the loss is traced outside of the map, where nothing has a type that varies
        check_vma=False,
    )(*state_and_batch)


def check_parameters(params: Any, options: StepOptions) -> None:
    """ValueError for parameters sharded over the axes of the batch."""
    for path, x in jax.tree.leaves_with_path(params):
        spec = getattr(getattr(x, "sharding", None), "spec", ())
        if _names(spec) & {*options.axis_name}:
            raise ValueError(
                f"params{keystr(path)} is sharded over {spec}: with a mesh the "
                f"gradients are summed whole on each device of "
                f"axis_name={axis_text(options.axis_name)}, which takes parameters "
                "that are replicated over it. Shard them over another axis, or leave "
                "mesh and axis_name out"
            )


def _check_batch(batch, count: int, options: StepOptions) -> None:
    for path, x in jax.tree.leaves_with_path(batch):
        if not x.shape or x.shape[0] % (count * options.n):
            raise ValueError(
                f"batch{keystr(path)} of shape {x.shape}: its first axis must be a "
                f"multiple of n={options.n} micro-batches times the {count} devices "
                f"of axis_name={axis_text(options.axis_name)}"
            )


def _micro_batch(batch, parts: int) -> Any:
    """The types of a micro-batch of one device."""
    first = lambda x: jax.tree.map(lambda y: y[0], split_batch(x, parts))
    return jax.eval_shape(first, batch)


def _without_axes(loss_fn: Callable, axes: Sequence[str], *args: Any) -> Callable:
    """The loss with no axis of these in its sharding constraints."""
    # of types that name no mesh: in the map it is another one
    bare = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
    traced, out = jax.make_jaxpr(loss_fn, return_shape=True)(*bare)
    named = (e for e in jaxprs.walk(traced) if primitives.is_constraint(e))
    if not any({*axes} & _axes_of(eqn) for eqn in named):
        return loss_fn
    tree = jax.tree.structure(out)

    def inside(*args):
        leaves = jax.tree.leaves(args)
        outs = jaxprs.evaluate(_freed(traced, frozenset(axes)), leaves)
        return jax.tree.unflatten(tree, outs)

    return inside


def _axes_of(eqn) -> set[str]:
    """The mesh axes that a sharding constraint names."""
    return _names(getattr(eqn.params["sharding"], "spec", ()))


def _names(spec) -> set[str]:
    parts = (part if isinstance(part, tuple) else (part,) for part in spec)
    return {name for part in parts for name in part if name is not None}


def _freed(body: Any, axes: frozenset[str]) -> Any:
    """A jaxpr, or a parameter that may hold some, without these axes."""
    if isinstance(body, _compat.Jaxpr):  # in newer jax, closed ones too
        return _freed_jaxpr(body, axes)
    if isinstance(body, _compat.ClosedJaxpr):
        return body.replace(jaxpr=_freed_jaxpr(body.jaxpr, axes))
    if isinstance(body, tuple):
        return tuple(_freed(part, axes) for part in body)
    return body


def _freed_jaxpr(jaxpr, axes: frozenset[str]) -> Any:
    # The type of a value that has been constrained names the mesh: another one here.
    bare: dict[Any, Any] = {}

    def atom(v):
        if not isinstance(v, _compat.Var):
            return v
        return bare.setdefault(v, _compat.without_mesh(v))

    def equation(eqn):
        ins, outs = map(atom, eqn.invars), map(atom, eqn.outvars)
        changed = _freed_equation(eqn, axes)
        return changed.replace(invars=list(ins), outvars=list(outs))

    return jaxpr.replace(
        constvars=list(map(atom, jaxpr.constvars)),
        invars=list(map(atom, jaxpr.invars)),
        eqns=list(map(equation, jaxpr.eqns)),
        outvars=list(map(atom, jaxpr.outvars)),
    )


def _freed_equation(eqn, axes: frozenset[str]) -> Any:
    params = {name: _freed(value, axes) for name, value in eqn.params.items()}
    if primitives.is_constraint(eqn):
        sharding = params["sharding"]
        # of a map the other axes alone are left, of its own mesh
        mesh = jax.sharding.get_abstract_mesh()
        spec = PartitionSpec(*(_left(part, axes) for part in sharding.spec))
        params["sharding"] = NamedSharding(mesh, spec)
        if "context_mesh" in params:
            params["context_mesh"] = mesh
    return eqn.replace(params=params)


def _left(part: Any, axes: frozenset[str]) -> Any:
    """Of the axes that shard a dimension those that are not among `axes`."""
    if isinstance(part, tuple):
        return tuple(name for name in part if name not in axes) or None
    return None if part in axes else part
