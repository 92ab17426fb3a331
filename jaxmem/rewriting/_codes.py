"""Codes that several layers share, found once the whole function is traced."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxmem import _compat
from jaxmem._checks import check_callable
from jaxmem.ir import jaxprs as _jaxpr
from jaxmem.ir import primitives
from jaxmem.ops.codes import CodeReader, sharing
from jaxmem.ops.marks import record_of
from jaxmem.rewriting._bodies import with_bodies


def share_codes(fn: Callable) -> Callable:
    """A function like `fn`, whose marked layers store one array once.

    Args:
      fn: any function that JAX can trace, of any pytrees.

    Returns:
      A function of the same signature and values.
    """
    check_callable("fn", fn)

    @functools.wraps(fn)
    def shared(*args, **kwargs):
        traced = _jaxpr.trace(fn, *args, **kwargs)
        with sharing():
            outs = _run(traced.jaxpr, traced.leaves)
        return jax.tree.unflatten(traced.out_tree, outs)

    return shared


def _mark(eqn) -> Callable | None:
    # The mark, whole: a partial evaluation leaves halves of the same name.
    record = record_of(eqn, CodeReader)
    if record is None or (len(eqn.invars), len(eqn.outvars)) != (record.arity, 1):
        return None
    return record.run


def _is_marked(body: Any) -> bool:
    return any(_mark(eqn) is not None for eqn in _jaxpr.walk(body))


def _is_call_of_marks(eqn) -> bool:
    # A `jit` of nothing else, as round most functions of `jax.nn`.
    if not primitives.is_jit(eqn):
        return False
    jaxpr, _ = _jaxpr.split(_jaxpr.bodies(eqn)[0])
    marks = [e for e in jaxpr.eqns if _mark(e) is not None]
    made = {v for e in marks for v in e.outvars}
    read = [v for e in marks for v in e.invars]
    known = {v for v in (*read, *jaxpr.outvars) if _jaxpr.is_var(v)}
    return len(known) > 0 and known <= made.union(jaxpr.invars)


def _run(body, args: Sequence[Any]) -> list[Any]:
    # Each mark is run anew, in order: those which read one array make its codes once,
    # and a layer after an activation reads the codes of the activation's input.
    return _jaxpr.evaluate(body, args, _anew)


def _anew(eqn, args) -> list[Any] | None:
    """The outputs of an equation with marks; None for any other."""
    mark = _mark(eqn)
    if mark is not None:
        return [_compat.in_context_of(eqn, mark, *args)]
    bodies = _jaxpr.bodies(eqn)
    if not any(map(_is_marked, bodies)):
        return None
    if _is_call_of_marks(eqn):
        # inlined: codes are shared within one trace
        return _compat.in_context_of(eqn, _run, bodies[0], args)
    return with_bodies(eqn, args, [functools.partial(_run, b) for b in bodies])
