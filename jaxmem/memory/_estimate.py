"""What a step takes on a chip, by compiling it for that chip.

No array is allocated and no accelerator is needed: arguments may be
`jax.ShapeDtypeStruct`, and the compile runs in a worker process. The figures are the
compiler's own buffer assignment. CPU compiles say nothing about rematerialisation:
XLA:CPU undoes `jax.checkpoint` in unrolled code.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any, cast

from jaxmem._checks import (
    check_bool,
    check_callable,
    check_float,
    check_options,
    check_places,
)
from jaxmem.frameworks import Place, pure_call
from jaxmem.memory import _compile
from jaxmem.memory._donation import donations
from jaxmem.memory._pending import Extent, Pending
from jaxmem.memory._pool import own_flags
from jaxmem.memory._report import MemoryReport
from jaxmem.memory._step import Step, make_step
from jaxmem.memory._targets import Target, get_target

# fn -> what was made of it, as long as it lives: jit's own contract for its caches
_SEEN: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()


def estimate(
    fn: Callable,
    *args: Any,
    target: str | Target | None = None,
    donate_argnums: int | Sequence[int] = (),
    donate_argnames: str | Sequence[str] = (),
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    timeout: float = 600.0,
    compiler_options: dict[str, Any] | None = None,
    cache: bool = True,
    full: bool = False,
    **kwargs: Any,
) -> MemoryReport:
    """Compiles a step for a target and reports the bytes it takes, and who holds them.

    The peak is arguments + outputs + temporaries - donated outputs, in bytes on one
    device, and leaves out what the framework itself holds. Results are kept on disk,
    keyed by the lowered program, the target and the versions.

    The report's notes tell of each donation that did not happen, with the reason, and
    of each argument kept twice: one that is not donated although the step returns an
    updated array of the same shape and dtype (computed from it element by element), or
    one that the compiled program copies.

    Args:
      fn: the step: any function that `jax.jit` takes, already jitted or not. A jitted
        one brings its own donated and static arguments along.
      *args: arrays or `jax.ShapeDtypeStruct`, in any pytrees; with a `NamedSharding`
        over a mesh (see `jaxmem.target_mesh`) where the step is sharded.
      target: a name of `jaxmem.targets()`, "cpu" by default.
      donate_argnums: positional arguments whose buffers the step may reuse.
      donate_argnames: the same for keyword arguments.
      static_argnums: positional arguments that are Python values, not arrays.
      static_argnames: the same for keyword arguments.
      timeout: seconds that the compile may take.
      compiler_options: as for `jax.jit`.
      cache: whether a result on disk may be used.
      full: whether to generate code for a GPU. By default the compile ends when XLA has
        assigned the buffers, which takes a half to a tenth of the time: all that is
        reported is known by then. What the code generator refuses is seen with it
        alone. Steps with kernels of their own, and those for other targets, are always
        compiled to the end.
      **kwargs: the step's keyword arguments.

    Returns:
      A `MemoryReport`.

    Raises:
      ValueError: unknown target, arguments that do not fit the step, a step that calls
        back into Python.
      TypeError: a step that cannot be traced, an argument that is no array.
      RuntimeError: this installation cannot compile for the target (says how to
        install what is missing), or the compiler failed or died.
      TimeoutError: the compile took longer than `timeout`.

    Example::

      report = jaxmem.estimate(step, state, batch, target="h100", donate_argnums=0)
      print(report)
    """
    check_bool("full", full)
    return begin(
        fn,
        args,
        kwargs,
        target=target,
        donate=check_places(
            donate_argnums=donate_argnums, donate_argnames=donate_argnames
        ),
        static=check_places(
            static_argnums=static_argnums, static_argnames=static_argnames
        ),
        timeout=timeout,
        compiler_options=compiler_options,
        cache=cache,
        extent="all" if full else "needed",
    ).result()


def begin(
    fn: Callable,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    target: str | Target | None = None,
    donate: Sequence[Place] = (),
    static: Sequence[Place] = (),
    timeout: float = 600.0,
    compiler_options: dict[str, Any] | None = None,
    cache: bool = True,
    extent: Extent = "needed",
    products: int | None = None,
) -> Pending:
    """Lowers a step and starts its compile, to be asked for later.

    Args:
      fn: as for `estimate`.
      args: its positional arguments.
      kwargs: its keyword arguments.
      target: as for `estimate`.
      donate: positions and names of donated arguments; none for those of a jitted step.
      static: positions and names of arguments that are no arrays.
      timeout: as for `estimate`.
      compiler_options: as for `estimate`.
      cache: as for `estimate`.
      extent: how far the compile goes, see `generates_code`.
      products: as in `Pending`.

    Returns:
      A `Pending` report.

    Raises:
      What `estimate` raises before the compile.
    """
    chip = get_target(target)
    check_callable("fn", fn)
    timeout = check_float("timeout", timeout, above=0)
    check_bool("cache", cache)
    compiler_options = check_options("compiler_options", compiler_options)
    with pure_call(fn, args, kwargs, donate or None, static) as call:
        step = make_step(fn, call)
        jitted, known = _memo(fn, step)
        traced = _compile.trace(jitted, step)
        if compiler_options is None:
            compiler_options = call.own.compiler_options
        options = tuple(sorted((compiler_options or {}).items()))
        # the jaxpr is the same object as long as jit would not trace anew
        seen = id(traced.jaxpr), chip.name, options, own_flags(), extent, products
        if cache and seen in known and known[seen][1].done:
            return known[seen][1]
        step = _compile.spread(step, traced)
        artefact = _compile.lower(jitted, traced, step, chip, compiler_options)
    about = donations(step, traced, artefact.kept, artefact.out_avals)
    pending = Pending(artefact, step, chip, about, timeout, extent, cache, products)
    known[seen] = traced.jaxpr, pending.begin()
    return pending


def _memo(fn: Callable, step: Step) -> tuple[Any, dict[Any, Any]]:
    """The jitted flat step and its reports, the same ones for the same call."""
    try:
        per_fn = _SEEN.setdefault(fn, {})
        found = per_fn.get(step)
        reference = weakref.ref(fn)
    except TypeError:  # a callable or a static value without hash or weak reference
        return _compile.flat_function(lambda: fn, step), {}
    if found is None:
        # not fn itself: what the dictionary holds must not keep its key alive
        found = _compile.flat_function(cast(Callable, reference), step), {}
        per_fn[step] = found
    return found
