"""One call of a step, as a pure function of pytrees of arrays.

with pure_call(step, args, kwargs) as call:
    out = jax.jit(call.form.pure(step))(*call.args, **call.kwargs)
    result = call.finish(out)
"""

import contextlib
import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jaxmem.frameworks._donated import check_donated
from jaxmem.frameworks._form import Form, give_back, leaf_of, splitting
from jaxmem.frameworks._jitted import Jitted
from jaxmem.frameworks._places import Place, resolve
from jaxmem.frameworks._shardings import canonical, check_shardings
from jaxmem.frameworks.framework import Framework
from jaxmem.frameworks.registry import compiler_of, in_use, jitted
from jaxmem.ir import jaxprs as _jaxpr


@dataclass(frozen=True)
class Call:
    """A call as `pure_call` yields it."""

    # With a `SplitObject` in the place of each object of a framework.
    args: tuple[Any, ...]  # positional arguments of the pure function
    kwargs: dict[str, Any]  # its keyword arguments
    form: Form  # all else; the same function, form and shapes give the same trace
    inside: bool = False  # whether it is traced as part of another function
    own: Jitted = Jitted()  # the options of the step itself, if it is jitted

    @functools.cached_property
    def signature(self) -> Hashable:
        """Equal for calls with the same trace, and with arrays on the same devices."""
        leaves, tree = jax.tree.flatten((self.args, self.kwargs))
        return self.form, tree, tuple(map(_kind, leaves))

    def check_donated(self, fn: Callable) -> None:
        """ValueError where `fn` cannot be called so: an array in two arguments."""
        check_donated(fn, self.args, self.kwargs, self.form)

    def finish(self, out: Any) -> Any:
        """The step's own result; its objects are updated."""
        if self.form.as_it_is:
            return out
        return give_back(self.form, (self.args, self.kwargs), out)


@contextlib.contextmanager
def pure_call(
    fn: Callable,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    donate: Sequence[Place] | None = None,  # None for those of a jitted step
    static: Sequence[Place] = (),
) -> Iterator[Call]:
    """Opens a call; it must be open while its pure function is traced or run."""
    if not callable(fn):
        raise TypeError(f"fn must be a function, got {type(fn).__name__}: {fn!r}")
    own = jitted(fn, args, kwargs) or Jitted()
    donated = own.donated if donate is None else donate
    donated, fixed = donated_and_static(
        fn, args, kwargs, donated, (*static, *own.static)
    )
    values = _static_values(fixed, args, kwargs)
    rest = tuple(x for i, x in enumerate(args) if i not in fixed)
    named = {k: v for k, v in kwargs.items() if k not in fixed}
    compiler = compiler_of(fn)
    with contextlib.ExitStack() as stack:
        # without jit, a trace has each iteration of each loop, and calls written out
        stack.enter_context(jax.disable_jit(False))
        owners = _owners((rest, named), compiler)
        for framework in owners:
            stack.enter_context(framework.carried())
        static_leaves = compiler is not None and compiler.static_leaves
        as_it_is = not (owners or values or static_leaves)
        shifted = _without_gaps(donated, fixed)
        objects = tuple(f for f in owners if f.in_place)
        form = Form(as_it_is, values, shifted, objects, compiler)
        if not as_it_is:
            with splitting(form) as split:
                rest = tuple(map(split, rest))
                named = {k: split(v) for k, v in named.items()}
        check_shardings(rest, named)
        inside = any(map(_jaxpr.is_abstract, jax.tree.leaves((rest, named))))
        yield Call(rest, named, form, inside, own)


def donated_and_static(
    fn: Callable,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    donate: Sequence[Place],
    static: Sequence[Place],
) -> tuple[frozenset[Place], frozenset[Place]]:
    """(donated, static) as the call has them; ValueError for a place it has not."""
    donated = resolve("donate", fn, donate, args, kwargs)
    fixed = resolve("static", fn, static, args, kwargs)
    if clash := donated & fixed:
        raise ValueError(f"arguments {sorted(map(str, clash))} are donated and static")
    return donated, fixed


def _static_values(fixed, args, kwargs) -> tuple[tuple[Place, Any], ...]:
    """(place, value) by position, then by name."""
    values: list[tuple[Place, Any]] = []
    for place in sorted(fixed, key=lambda p: (isinstance(p, str), p)):
        value = args[place] if isinstance(place, int) else kwargs[place]
        try:
            hash(value)
        except TypeError as error:
            raise TypeError(
                f"static argument {place!r} is {value!r}, which has no hash: a static "
                "argument tells by hash and equality whether a step is compiled anew"
            ) from error
        values.append((place, value))
    return tuple(values)


def _without_gaps(donated, fixed) -> tuple[Place, ...]:
    """Donated places counted without the static positions before them."""
    before = lambda p: sum(isinstance(f, int) and f < p for f in fixed)
    numbers = sorted(p - before(p) for p in donated if isinstance(p, int))
    return (*numbers, *sorted(p for p in donated if isinstance(p, str)))


def _kind(leaf: Any) -> Hashable:
    """What the trace depends on; a Python scalar is traced, as in `jit`."""
    if not _jaxpr.is_array(leaf):
        return type(leaf)
    sharding = None if _jaxpr.is_abstract(leaf) else getattr(leaf, "sharding", None)
    return (
        leaf.shape,
        leaf.dtype,
        getattr(leaf, "weak_type", False),
        canonical(sharding),
    )


_KNOWN: dict[Any, tuple[Framework, ...]] = {}  # structure and types -> `_owners`


def _owners(tree: Any, compiler: Framework | None) -> tuple[Framework, ...]:
    """The frameworks of the objects in a pytree."""
    leaves, structure = jax.tree.flatten(tree)
    frameworks = tuple(in_use())
    key = structure, frozenset(map(type, leaves)), compiler, frameworks
    try:
        if key not in _KNOWN:
            _KNOWN[key] = _search(tree, compiler, frameworks)
        return _KNOWN[key]
    except TypeError:  # a structure with something in it that has no hash
        return _search(tree, compiler, frameworks)


def _search(
    tree: Any, compiler: Framework | None, frameworks: tuple[Framework, ...]
) -> tuple[Framework, ...]:
    leaves = jax.tree.leaves(tree, is_leaf=leaf_of(compiler))
    return tuple(f for f in frameworks if any(map(f.owns, leaves)))
