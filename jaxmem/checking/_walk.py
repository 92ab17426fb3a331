"""A jaxpr evaluated with a visitor at each of its equations, in calls and loops too."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from jax import lax

from jaxmem import _compat
from jaxmem.ir import jaxprs, primitives
from jaxmem.ir.flatten import is_plain_call, opened
from jaxmem.ir.primitives import Kind
from jaxmem.ir.scans import split


class Visitor(Protocol):
    """What looks at equations, and may change what goes in and what comes out."""

    def before(self, eqn, args: list) -> list:
        """The operands that the equation is given."""
        ...

    def after(self, eqn, stack: str, outs: list) -> list:
        """Its results; `stack`: the name scopes that it is in."""
        ...

    def of_iteration(self, eqn) -> "Visitor":
        """The visitor of one iteration of a scan; its values are stacked."""
        ...

    def take(self, stacked: Any) -> None:
        """The stacked `seen` of the iterations."""
        ...

    def of_branch(self) -> "Visitor":
        """The visitor of a `while`'s body or of a branch, of which nothing is seen."""
        ...

    def of_shard(self) -> "Visitor":
        """The visitor of a `shard_map`'s body, which no traced value may enter."""
        ...

    @property
    def seen(self) -> Any:
        """The values that the visitor has kept: a pytree of arrays."""
        ...


def walk(body, args: Sequence[Any], visitor: Visitor, stack: str = "") -> list[Any]:
    """The outputs of a closed jaxpr."""
    return jaxprs.evaluate(body, args, _rule(visitor, stack))


def _rule(visitor: Visitor, stack: str) -> Callable[[Any, list], list[Any]]:
    """How each equation is evaluated in these name scopes."""

    def rule(eqn, args: list) -> list[Any]:
        scopes = "/".join(part for part in (stack, _compat.name_stack(eqn)) if part)
        if (way := _way_into(eqn)) is not None:
            enter = partial(way, eqn, args, visitor, scopes)
            return _compat.in_context_of(eqn, enter)
        if is_plain_call(eqn) or primitives.is_remat(eqn):
            return opened(eqn, args, _rule(visitor, scopes))
        outs = _compat.bind(eqn, visitor.before(eqn, args))
        return _compat.in_context_of(eqn, lambda: visitor.after(eqn, scopes, outs))

    return rule


def _call(eqn, args: list, visitor: Visitor, stack: str) -> list[Any]:
    return walk(jaxprs.bodies(eqn)[0], args, visitor, stack)


def _scan(eqn, args: list, visitor: Visitor, stack: str) -> list[Any]:
    consts, carry, xs = split(eqn, args)
    body, n = eqn.params["jaxpr"], len(carry)

    def iteration(carry, xs):
        own = visitor.of_iteration(eqn)
        outs = walk(body, [*consts, *carry, *xs], own, stack)
        return tuple(outs[:n]), (tuple(outs[n:]), own.seen)

    how = {k: eqn.params[k] for k in ("length", "reverse", "unroll")}
    carry, (ys, seen) = lax.scan(iteration, tuple(carry), tuple(xs), **how)
    visitor.take(seen)
    return [*carry, *ys]


def _while(eqn, args: list, visitor: Visitor, stack: str) -> list[Any]:
    tests, bodies = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    of_test, of_body = args[:tests], args[tests : tests + bodies]
    own = visitor.of_branch()

    def goes_on(carry):
        return jaxprs.evaluate(eqn.params["cond_jaxpr"], [*of_test, *carry])[0]

    def iteration(carry):
        return tuple(walk(eqn.params["body_jaxpr"], [*of_body, *carry], own, stack))

    return list(lax.while_loop(goes_on, iteration, tuple(args[tests + bodies :])))


def _cond(eqn, args: list, visitor: Visitor, stack: str) -> list[Any]:
    index, *rest = args
    own = visitor.of_branch()

    def of(body):
        return lambda *args: tuple(walk(body, args, own, stack))

    return list(lax.switch(index, list(map(of, eqn.params["branches"])), *rest))


def _shard_map(eqn, args: list, visitor: Visitor, stack: str) -> list[Any]:
    own = visitor.of_shard()
    body = jaxprs.bodies(eqn)[0]
    shards = lambda args: walk(body, args, own, stack)
    return _compat.shard_map_again(eqn, shards, args)


_ENTERED = {"scan": _scan, "while": _while, "cond": _cond, "shard_map": _shard_map}


def _way_into(eqn) -> Callable[..., list[Any]] | None:
    """How what is in an equation is evaluated, where that is told about."""
    known = primitives.of(eqn)
    if known.kind in (Kind.CUSTOM_JVP, Kind.CUSTOM_VJP):
        return _call
    return _ENTERED.get(known.name)
