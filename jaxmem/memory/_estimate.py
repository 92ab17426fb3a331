"""The bytes that a step takes on a chip, by compiling it for that chip.

The figures are the compiler's own buffer assignment. A compile for cpu tells nothing of
recomputation, because XLA:CPU undoes `jax.checkpoint` in unrolled code.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

from jaxmem._checks import check_bool, check_callable, check_donated, check_static
from jaxmem._garbage import seldom_collected
from jaxmem.chips import Target, get_target, traced_for
from jaxmem.frameworks import Place, pure_call
from jaxmem.ir.lost_axes import lost_axes
from jaxmem.memory._pending import CompileSettings, Pending
from jaxmem.memory.compile.call import FlatCall, flatten_call
from jaxmem.memory.compile.lower import TracedCall, flat_function, lower, trace
from jaxmem.memory.compile.pool import caller_flags
from jaxmem.memory.report.advice import AdvisedStep, LateAdvice
from jaxmem.memory.report.donation import donations
from jaxmem.memory.report.report import MemoryReport

# function -> call -> (jitted flat function, its reports). Entries live as long as the
# function does, as those of `jax.jit`'s own caches do.
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
    trips: int | None = None,
    **kwargs: Any,
) -> MemoryReport:
    """Compiles a step for a target; reports its bytes and the buffers they are in.

    The peak is arguments + outputs + temporaries - donated outputs, in bytes on one
    device, and does not include memory of the framework itself. Results are cached on
    disk, keyed by the lowered program, the target and the versions.

    The report's notes name each donated argument whose buffer was not reused, with the
    reason, and each argument that is in memory twice: one that is not donated although
    the step returns an updated array of the same shape and dtype (computed from it
    element by element), or one that the compiled program copies. For a GPU they also
    say where XLA of this version reads slices of arrays in host memory from wrong
    addresses (`MemoryReport.wrong_slices`).

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
        assigned the buffers, which takes a half to a tenth of the time: everything in
        the report is known by then. Only a full compile shows what the code generator
        refuses. Steps for other targets are always compiled completely, and so is
        the first step of a process that calls a custom kernel.
      trips: for the predicted seconds, iterations of loops whose compiled text does not
        tell how often they run; the report names them. None counts one.
      **kwargs: the step's keyword arguments.

    Returns:
      A `MemoryReport`.

    Raises:
      ValueError: unknown target, arguments that do not fit the step, one array in two
        arguments of which one is donated, a step that takes values from Python while
        it runs (`jax.pure_callback`; a `jax.debug.print` is left out, with a note).
      TypeError: a step that cannot be traced, an argument that is no array.
      CompileError: the step cannot be lowered for the target, as with a kernel that the
        chip has no instructions for, or the compiler failed or died.
      RuntimeError: this installation cannot compile for the target (says how to
        install what is missing).
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
        donate=check_donated(donate_argnums, donate_argnames),
        static=check_static(static_argnums, static_argnames),
        timeout=timeout,
        compiler_options=compiler_options,
        cache=cache,
        extent="all" if full else "needed",
        trips=trips,
    ).result()


@seldom_collected()
def begin(
    fn: Callable,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    target: str | Target | None = None,
    donate: Sequence[Place] = (),  # none for those of a jitted step
    static: Sequence[Place] = (),
    **settings: Any,  # of `CompileSettings`
) -> Pending:
    """Lowers a step and starts its compile; ask the result for the report later."""
    chip = get_target(target)
    check_callable("fn", fn)
    how = CompileSettings(**settings).checked()
    with pure_call(fn, args, kwargs, donate or None, static) as pure:
        pure.check_donated(fn)
        call = flatten_call(fn, pure)
        jitted, reports = _memo(fn, call)
        with traced_for(chip):
            traced = trace(jitted, call)
        if how.compiler_options is None:
            how = replace(how, compiler_options=pure.own.compiler_options)
        options = tuple(sorted((how.compiler_options or {}).items()))
        # The jaxpr is the same object as long as `jax.jit` would not trace anew.
        key = id(traced.jaxpr), chip.name, options, caller_flags()
        key = *key, how.extent, how.products, how.advised, how.trips
        if how.cache and key in reports and reports[key][1].done:
            return reports[key][1]
        lowered = lower(jitted, traced, call, chip, how.compiler_options)
    advice = _advice(call, traced.jaxpr, chip) if how.advised else LateAdvice()
    told = f"{caller_flags()} {lowered.request['compiler_options']}"
    facts = TracedCall(call, jitted, traced).facts(lowered.used, told)
    about = donations(lowered, traced), facts, how, how.products, advice
    pending = Pending(lowered, chip, *about)
    # the jaxpr is held so that no other one gets its id
    reports[key] = traced.jaxpr, pending.begin()
    return pending


def _advice(call: FlatCall, closed: Any, chip: Target) -> LateAdvice:
    """What the equations tell at once, and who is asked for the rest."""
    lost = lost_axes(closed, call.shardings)
    lines = (f"{one}: write in the layer {one.constraint}" for one in lost)
    donated = tuple(i for i, leaf in enumerate(call.leaves) if leaf.donated)
    specs = tuple(leaf.spec for leaf in call.leaves)
    step = AdvisedStep(closed, donated, specs, chip.name)
    return LateAdvice(tuple(dict.fromkeys(lines)), step)


def _memo(fn: Callable, call: FlatCall) -> tuple[Any, dict[Any, Any]]:
    """The jitted flat function and its reports, the same ones for equal calls."""
    try:
        per_call = _SEEN.setdefault(fn, {})
        entry = per_call.get(call)
        reference = weakref.ref(fn)
    except TypeError:  # a callable or a static value without hash or weak reference
        return flat_function(lambda: fn, call), {}
    if entry is None:
        # a weak reference: what the dictionary holds must not keep its key alive
        entry = flat_function(cast(Callable, reference), call), {}
        per_call[call] = entry
    return entry
