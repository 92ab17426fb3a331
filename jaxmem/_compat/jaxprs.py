"""Jaxprs: their types, and equations that are done, traced or read once more."""

import dataclasses
import functools
from typing import Any

import jax
import jax.core
from jax.extend import core as jex_core
from jax.extend.core import primitives as public_primitives

# The primitives that a user may bind.
PRIMITIVES = public_primitives
ClosedJaxpr = jex_core.ClosedJaxpr
Jaxpr = jex_core.Jaxpr
Literal = jex_core.Literal
Primitive = jex_core.Primitive
Var = jex_core.Var


def bind(eqn, args, params=None) -> list[Any]:
    """Outputs of `eqn` on `args`, under its own source line and name scopes."""
    outs = _copied(eqn, args) if params is None else None
    if outs is not None:
        return outs
    params = eqn.primitive.get_bind_params(eqn.params if params is None else params)
    outs = in_context_of(eqn, functools.partial(eqn.primitive.bind, **params), *args)
    return list(outs) if eqn.primitive.multiple_results else [outs]


def _copied(eqn, args) -> list[Any] | None:
    """Outputs of a copy of an equation in the current trace; None where `bind` has to.

    On operands of the same types an equation gives what it gave: in half of the time
    that it takes to work that out anew.
    """
    from jax._src import core
    from jax._src.interpreters import partial_eval
    from jax._src.source_info_util import current_name_stack
    from jax._src.xla_metadata_lib import current_xla_metadata

    trace, tracer_of = core.trace_ctx.trace, partial_eval.DynamicJaxprTracer
    if type(trace) is not partial_eval.DynamicJaxprTrace or trace.requires_low:
        return None
    is_traced = False
    tracers = []
    for arg, v in zip(args, eqn.invars, strict=True):
        if isinstance(arg, tracer_of):
            # most are of the very same type: identity spares most comparisons
            same = arg.aval is v.aval or arg.aval == v.aval
            if arg._trace is not trace or not same:
                return None
            is_traced = True
            tracers.append(arg)
        elif isinstance(v, Literal) and arg is v.val:
            tracers.append(tracer_of(trace, v.aval, v, eqn.source_info))
        else:
            return None
    if not is_traced or not _is_plain(eqn) or current_xla_metadata():
        return None
    info = eqn.source_info
    stack = current_name_stack()
    if stack.stack:
        info = info.replace(name_stack=stack + info.name_stack)
    types = [v.aval for v in eqn.outvars]
    told = eqn.primitive, eqn.params, eqn.effects, info, eqn.ctx
    return trace.emit_eqn(tracers, types, *told)


def _is_plain(eqn) -> bool:
    """Whether an equation is told by its parameters alone, without any function."""
    # calls, loops, custom rules and kernels are traced by rules of their own
    if eqn.effects or eqn.primitive.ref_allocating:
        return False
    if operation(eqn)[1] is not eqn.params:
        return False
    if any(type(v.aval) is not jax.core.ShapedArray for v in eqn.outvars):
        return False
    values = eqn.params.values()
    return not any(_has_jaxpr(x) or callable(x) for x in values)


def in_context_of(eqn, fn, *args):
    """`fn(*args)` under the source line and the name scopes of `eqn`."""
    from jax._src.source_info_util import current_name_stack, user_context

    info = eqn.source_info
    stack = current_name_stack() + info.name_stack
    with user_context(info.traceback, name_stack=stack), eqn.ctx.manager:
        return fn(*args)


def in_mesh_in_context(jaxpr):
    """A jaxpr whose equations, traced in no mesh, are in the one that is in context.

    An equation is lowered in the mesh that it was traced in.
    """
    mesh = jax.sharding.get_abstract_mesh()
    known: dict[int, Any] = {}  # JAX lowers once what several equations share

    def within(value):
        if isinstance(value, (tuple, list)):
            return type(value)(map(within, value))
        if not isinstance(value, (Jaxpr, ClosedJaxpr)):
            return value
        if id(value) not in known:
            closed = isinstance(value, ClosedJaxpr)
            new = all_moved(value.jaxpr if closed else value)
            known[id(value)] = value.replace(jaxpr=new) if closed else new
        return known[id(value)]

    def all_moved(jaxpr):
        return jaxpr.replace(eqns=list(map(moved, jaxpr.eqns)))

    def moved(eqn):
        if eqn.ctx.cur_abstract_mesh.empty:
            eqn = in_mesh(eqn, mesh)
        params = {k: within(v) if _has_jaxpr(v) else v for k, v in eqn.params.items()}
        return eqn.replace(params=params)

    return all_moved(jaxpr)


def in_mesh(eqn, mesh):
    """The equation as if it had been traced in this mesh."""
    from jax._src.core import JaxprEqnContext

    with eqn.ctx.manager, jax.sharding.use_abstract_mesh(mesh):
        return eqn.replace(ctx=JaxprEqnContext())


def declared_cost(eqn) -> dict[str, int] | None:
    """What the author of a Pallas kernel says that it costs; None of all else.

    Its flops, transcendentals and bytes_accessed, as a `pl.CostEstimate` has them.
    """
    if eqn.primitive.name not in ("pallas_call", "mpmd_map"):
        return None
    told = eqn.params.get("cost_estimate")
    if told is not None:
        return dataclasses.asdict(told)
    metadata = eqn.ctx.xla_metadata or {}
    return dict(metadata) if "flops" in metadata else None


def _has_jaxpr(value) -> bool:
    values = value if isinstance(value, (tuple, list)) else (value,)
    return any(isinstance(x, (Jaxpr, ClosedJaxpr)) for x in values)


def shard_map_again(eqn, body, args) -> list[Any]:
    """The `shard_map` of `eqn` with another body, a function of a list of shards."""
    names = eqn.params.get("newly_manual_axes", eqn.params.get("manual_axes"))
    mapped = jax.shard_map(
        lambda *shards: tuple(body(shards)),
        mesh=eqn.params["mesh"],
        in_specs=tuple(eqn.params["in_specs"]),
        out_specs=tuple(eqn.params["out_specs"]),
        axis_names=names,
        check_vma=eqn.params["check_vma"],
    )
    return list(in_context_of(eqn, mapped, *args))


def constants_first(closed):
    """A jaxpr without constants of its own: they become the first arguments."""
    from jax._src.interpreters import partial_eval

    if not hasattr(closed.jaxpr, "consts"):
        return partial_eval.convert_constvars_jaxpr(closed.jaxpr)
    n = len(closed.consts)
    avals = [v.aval for v in [*closed.jaxpr.constvars, *closed.jaxpr.invars]]

    def run(*args):
        return jax.core.eval_jaxpr(closed.jaxpr, args[:n], *args[n:])

    return jax.make_jaxpr(run)(*avals)


def without_dead_code(closed):
    """The jaxpr without equations that nobody needs; its inputs stay as they are."""
    from jax.interpreters import partial_eval

    jaxpr, consts = getattr(closed, "jaxpr", closed), closed.consts
    used = [True] * len(jaxpr.outvars)
    jaxpr, _ = partial_eval.dce_jaxpr(jaxpr, used, instantiate=True)
    return ClosedJaxpr(jaxpr, consts)


def operation(eqn) -> tuple[str, dict[str, Any]]:
    """The name and the parameters of an equation, or of what it has been made of.

    jax 0.12 traces some functions as one operation, of which it makes others late.
    """
    whole = eqn.params.get("_prim")
    if eqn.primitive.name != "call_hi_primitive" or whole is None:
        return eqn.primitive.name, eqn.params
    return type(whole).__name__, whole.params


def scan_counts(eqn) -> tuple[int, int]:
    """(constants, carries) among the inputs of a `scan` equation; the rest are xs."""
    if "num_consts" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carry, _ = eqn.params["ft_in"].unpack()
    return len(consts), len(carry)


def has_side_effects(eqn) -> bool:
    """Whether an equation does more than compute; naming a mesh axis is no effect."""
    from jax._src.core import NamedAxisEffect

    return any(not isinstance(e, NamedAxisEffect) for e in eqn.effects)


def function_source(jaxpr) -> str:
    """Name and place of the function that a jaxpr was traced from."""
    return str(jaxpr.debug_info.func_src_info)


def trace_state() -> Any:
    """What tells, by `==`, whether two moments belong to one trace."""
    return jex_core.get_opaque_trace_state()


def is_tracing() -> bool:
    """Whether a function is traced now, so that a `jax.jit` is one in another."""
    from jax._src.core import trace_state_clean

    return not trace_state_clean()


def no_leak_check():
    """A context in which `jax.checking_leaks()` has no effect.

    It takes a cycle of references in code of ours for a tracer that has escaped.
    """
    from jax._src.config import check_tracer_leaks

    return check_tracer_leaks(False)
