"""`save="auto"`: which form an activation takes, from who reads its output.

An output is kept anyway where a product with something that is differentiated reads it.
Where the kernel is frozen, a code of a few bits or the input is cheaper. Right behind
a batch or group norm nothing is kept, see `_behind_norm`.
"""

import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero, zero_from_primal

from jaxmem import _compat
from jaxmem._checks import check_callable
from jaxmem.ir import jaxprs as _jaxpr
from jaxmem.ir import primitives
from jaxmem.ir.operands_first import operands_first
from jaxmem.ir.primitives import Kind
from jaxmem.ops.activations import AutoSave
from jaxmem.ops.marks import UnrolledOnTpu, record_of
from jaxmem.rewriting._behind_norm import behind, is_norm
from jaxmem.rewriting._bodies import with_bodies

_LOGGER = logging.getLogger("jaxmem")

# A pool whose derivative does not need what is pooled, as that of others does.
_LEAN_POOL = "jaxmem.max_pool"


@dataclass(frozen=True)
class SaveChoice:
    """What `save="auto"` came to in one place, when it was differentiated.

    Attributes:
      op: the activation.
      keeps: "output" (and a bit, for GELU and SiLU), "input", "<n> bits", or "nothing".
      reason: whether the output, or what the input is made of, is kept anyway, by what.
      shape: of the activation.
      source: file, line and function.
    """

    op: str
    keeps: str
    reason: str
    shape: tuple[int, ...]
    source: str

    def __str__(self) -> str:
        return (
            f"{self.op} {list(self.shape)} keeps {self.keeps} ({self.reason}) at "
            + (self.source or "an unknown place")
        )


def auto_save(
    fn: Callable, *, on_choice: Callable[[SaveChoice], Any] | None = None
) -> Callable:
    """A function like `fn` whose activations with `save="auto"` keep what is cheapest.

    One right behind a `batch_norm` of the batch's own statistics or a `group_norm`
    keeps nothing: what it needs is recomputed from the norm's input, which is kept.
    Others keep their output (GELU and SiLU: and a bit) where the next operation keeps
    it anyway: a matmul or convolution whose kernel is differentiated, or a product with
    a differentiated array; or else a code of `bits` bits if that was given, and their
    input if not. On a TPU one that is in no loop keeps its input in either case, since
    the compiler makes the output again in the product, and so do `layer_norm` and
    `rms_norm` with `save="output"`. Views in between (reshape, transpose) and functions
    called (`jit`, `checkpoint`, `scan`, ...) are looked through; an output that is
    cast, that goes through dropout first, or whose reader is outside of `fn` counts as
    not kept.

    `jaxmem.rewriting.rewrite`, and so `jaxmem.substitute`, do this too.

    Args:
      fn: any function that JAX can trace, of any pytrees.
      on_choice: called with the `SaveChoice` of each activation whenever the function
        is differentiated; the "jaxmem" logger is told at level INFO in any case.

    Returns:
      A function of the same signature and values; differentiate it, not `fn`.

    Raises:
      TypeError: `fn` is not callable.

    Example::

        def mlp(w, v, x):
            return jaxmem.ops.gelu(x @ w, save="auto", bits=2) @ v

        loss = lambda *args: jaxmem.rewriting.auto_save(mlp)(*args).sum()
        jax.grad(loss, argnums=0)  # v is frozen: 2 bits are kept
        jax.grad(loss, argnums=(0, 1))  # the matmul keeps the output: and a bit
    """
    check_callable("fn", fn)
    if on_choice is not None:
        check_callable("on_choice", on_choice, "a function of a SaveChoice, or None")

    def tell(choice: SaveChoice) -> None:
        _LOGGER.info('save="auto": %s', choice)
        if on_choice is not None:
            on_choice(choice)

    @functools.wraps(fn)
    def resolved(*args, **kwargs):
        traced = _jaxpr.trace(fn, *args, **kwargs)
        outs = _run(traced.jaxpr, traced.leaves, tell)
        return jax.tree.unflatten(traced.out_tree, outs)

    return resolved


def is_marked(body: Any) -> bool:
    """Whether a call whose form depends on those around it is somewhere in a jaxpr."""
    kinds = (AutoSave, UnrolledOnTpu) if _compat.is_for_tpu() else (AutoSave,)
    found = (record_of(eqn, kind) for eqn in _jaxpr.walk(body) for kind in kinds)
    return any(one is not None for one in found)


def _mark(eqn) -> AutoSave | None:
    return record_of(eqn, AutoSave)


# -- who reads an output


def _readers(jaxpr, var) -> tuple[list[Any], list[int]]:
    """What `var` is multiplied with in a jaxpr, and which of its outputs it is."""
    same, partners = {var}, []
    for eqn in jaxpr.eqns:
        places = [i for i, v in enumerate(eqn.invars) if _in(v, same)]
        if places and _LEAN_POOL in _compat.name_stack(eqn):
            continue
        for place in places:
            partners += _multiplied(eqn, place)
            if _is_view(eqn):
                out = eqn.outvars[place if len(eqn.outvars) > 1 else 0]
                same |= {out} if out.aval.size == var.aval.size else set()
            for inner, offset in _called(eqn, place):
                found, outs = _inside(inner, place - offset)
                partners += [eqn.invars[i + offset] for i in found]
                same.update(eqn.outvars[i] for i in outs)
    outs = [i for i, v in enumerate(jaxpr.outvars) if _in(v, same)]
    return list(dict.fromkeys(filter(_jaxpr.is_var, partners))), outs


def _is_view(eqn) -> bool:
    """Whether it only changes the look of an array: the same bytes are kept."""
    known = primitives.of(eqn)
    return known.same or known.kind is Kind.SHAPE


def _multiplied(eqn, place: int) -> list[Any]:
    """What an operation multiplies its input at `place` with."""
    known = primitives.of(eqn)
    if known.bilinear:
        return eqn.invars[:place] + eqn.invars[place + 1 :]
    return [eqn.invars[place]] if known.saves_operand else []


def _inside(jaxpr, place: int) -> tuple[list[int], list[int]]:
    """`_readers` of an argument of a body, by the arguments they depend on."""
    partners, outs = _readers(jaxpr, jaxpr.invars[place])
    needed = _ancestors(jaxpr, partners)
    return [i for i, v in enumerate(jaxpr.invars) if v in needed], outs


def _called(eqn, place: int) -> Iterator[tuple[Any, int]]:
    """Bodies that take an input, and how many come before the first they take."""
    if not primitives.is_while(eqn):  # the inputs of its bodies are not in order
        for body in _jaxpr.bodies(eqn):
            jaxpr, _ = _jaxpr.split(body)
            offset = len(eqn.invars) - len(jaxpr.invars)
            if 0 <= offset <= place:
                yield jaxpr, offset


def _in(atom, variables: set) -> bool:
    return _jaxpr.is_var(atom) and atom in variables


def _ancestors(jaxpr, wanted: Iterable) -> set:
    """Everything that those variables are made of, themselves included."""
    needed = set(wanted)
    for eqn in reversed(jaxpr.eqns):
        if any(out in needed for out in eqn.outvars):
            needed.update(v for v in eqn.invars if _jaxpr.is_var(v))
    return needed


# -- evaluation


Tell = Callable[[SaveChoice], None]


def _run(body, args: Sequence[Any], tell: Tell, looped: bool = False) -> list[Any]:
    """Runs a closed jaxpr with its marks resolved; `looped`: it is in a loop's body."""
    return _Evaluation(body, args, tell, looped).outputs()


class _Evaluation:
    """A closed jaxpr on its way, the partners of a mark made before the mark."""

    def __init__(self, body, args: Sequence[Any], tell: Tell, looped: bool) -> None:
        self.jaxpr, consts = _jaxpr.split(body)
        self.tell, self.looped = tell, looped
        ins = [*self.jaxpr.constvars, *self.jaxpr.invars]
        self.env = dict(zip(ins, [*consts, *args], strict=True))
        self.made_by = {out: eqn for eqn in self.jaxpr.eqns for out in eqn.outvars}
        # of marks whose partners are made first: those, None for what comes later
        self.pending: dict[Any, list[Any]] = {}

    def outputs(self) -> list[Any]:
        done = set()
        missing = lambda eqn: [] if id(eqn) in done else self._missing(eqn)
        for eqn in self.jaxpr.eqns:
            for one in operands_first(eqn, missing):
                if id(one) not in done:
                    done.add(id(one))
                    self._apply(one)
        return [self._read(v) for v in self.jaxpr.outvars]

    def _read(self, atom) -> Any:
        return self.env[atom] if _jaxpr.is_var(atom) else atom.val

    def _missing(self, eqn) -> list[Any]:
        """The equations to do before this one."""
        before = [v for v in eqn.invars if _jaxpr.is_var(v) and v not in self.env]
        if not before and _mark(eqn) is not None and self._norm_before(eqn) is None:
            partners = filter(None, self._partners(eqn.outvars[0]))
            before = [v for v in partners if v not in self.env]  # made after the mark
        return [self.made_by[v] for v in before]

    def _partners(self, out) -> list[Any]:
        """What the output of a mark is multiplied with; None for what waits for it."""
        if out not in self.pending:
            self.pending[out] = []
            partners, _ = _readers(self.jaxpr, out)
            self.pending[out] = [None if self._waits(v) else v for v in partners]
        return self.pending[out]

    def _waits(self, v) -> bool:
        return not self.pending.keys().isdisjoint(_ancestors(self.jaxpr, [v]))

    def _apply(self, eqn) -> None:
        values = [self._read(v) for v in eqn.invars]
        bodies = _jaxpr.bodies(eqn)
        mark = _mark(eqn)
        if mark is not None:
            x = jnp.asarray(values[0], eqn.invars[0].aval.dtype)  # it may be a literal
            outs = [self._resolved(eqn, mark, x)]
        elif self._remakes() and (other := record_of(eqn, UnrolledOnTpu)):
            outs = [_compat.in_context_of(eqn, other.form, *values)]
        elif any(map(is_marked, bodies)):
            looped = self.looped or primitives.is_loop(eqn)
            about = {"tell": self.tell, "looped": looped}
            inner = [functools.partial(_run, body, **about) for body in bodies]
            outs = with_bodies(eqn, values, inner)
        else:
            outs = _compat.bind(eqn, values)
        self.env.update(zip(eqn.outvars, outs, strict=True))

    def _remakes(self) -> bool:
        """Whether the compiler makes an output again in the products that read it."""
        return not self.looped and _compat.is_for_tpu()

    def _norm_before(self, eqn) -> Any:
        """The norm whose output an activation takes, if it does."""
        (x,) = eqn.invars
        before = self.made_by.get(x) if _jaxpr.is_var(x) else None
        if before is None or before.outvars[0] is not x:
            return None
        return before if is_norm(before) else None

    def _behind(self, norm, eqn, mark: AutoSave, x) -> Any:
        values = [self._read(v) for v in norm.invars]
        source = _compat.caller_line(eqn)
        reason = "the norm before it keeps what it is made of"
        tell = lambda: self.tell(
            SaveChoice(mark.name, "nothing", reason, x.shape, source)
        )
        return _compat.in_context_of(eqn, behind(norm, eqn, tell), x, *values)

    def _resolved(self, eqn, mark: AutoSave, x) -> Any:
        if (norm := self._norm_before(eqn)) is not None:
            return self._behind(norm, eqn, mark, x)
        # what is made of an output not there yet has a tangent if x has one
        partners = self.pending.pop(eqn.outvars[0])
        known = [x if v is None else self._read(v) for v in partners]
        op = _asking(mark, _compat.caller_line(eqn), self.tell, self._remakes())
        return _compat.in_context_of(eqn, op, x, *known)


def _asking(mark: AutoSave, source: str, tell: Tell, remade: bool) -> Callable:
    """The activation of x, told what its output is multiplied with.

    `remade`: the compiler makes the output again, in the products that read it.
    """

    # What is differentiated only JAX knows, when it differentiates: so the rule asks
    # which partners have a tangent. That holds through `jit`, `scan`, `checkpoint` and
    # others.
    @jax.custom_jvp
    def op(x, *partners):
        return mark.alone[0](x)

    @functools.partial(op.defjvp, symbolic_zeros=True)
    def _(primals, tangents):
        x, t = primals[0], tangents[0]
        if isinstance(t, SymbolicZero):
            y = mark.alone[0](x)
            return y, zero_from_primal(y, symbolic_zeros=True)
        kept = any(not isinstance(p, SymbolicZero) for p in tangents[1:])
        why = _why(kept, len(tangents) > 1)
        if kept and remade and mark.alone[1] == "input":
            kept, why = False, "a TPU makes the output again in the product"
        form, keeps = mark.shared if kept else mark.alone
        tell(SaveChoice(mark.name, keeps, why, x.shape, source))
        return jax.jvp(form, (x,), (t,))

    return op


def _why(kept: bool, has_readers: bool) -> str:
    if kept:
        return "the next product keeps the output anyway"
    return "the next product is frozen" if has_readers else "no product reads it"
