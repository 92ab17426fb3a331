"""`check`: a step and its reference on this device, from the same arguments."""

from collections.abc import Callable, Sequence
from os import PathLike
from typing import Any

import jax

from jaxmem._checks import (
    check_callable,
    check_int,
    check_places,
    check_static,
    wrong_type,
)
from jaxmem.checking._compare import StepComparison
from jaxmem.checking._guilty import guilty_passes, rewritable
from jaxmem.checking._modules import FirstModule, first_module
from jaxmem.checking._report import CheckReport, LeafDifference
from jaxmem.checking._roundings import roundings_told
from jaxmem.checking._runs import copied
from jaxmem.checking._script import Reproduction
from jaxmem.ir import jaxprs

Places = int | Sequence[int]
Names = str | Sequence[str]


def check(
    step: Callable,
    reference: Callable,
    *args: Any,
    steps: int = 3,
    carry: Places | None = None,
    static_argnums: Places = (),
    static_argnames: Names = (),
    script: str | PathLike[str] | None = None,
    **kwargs: Any,
) -> CheckReport:
    """Runs a step and its reference on this device, and compares all their results.

    Both are run on copies of the arguments for several steps, each with its own results
    as the next step's arguments. Where a result differs, the first module whose value
    differs is named, and of a step of `jaxmem.schedule` the pass that makes the
    difference: passes are switched off one by one.

    The tolerance is measured from the effect of rounding on the reference. The
    reference is run twelve more times, with each rounding operation perturbed at random
    by a unit roundoff of its dtype, sums of n terms by sqrt(n) of them. How far these
    runs lie from the plain one is measured for each result and each step, by the
    largest difference, the root mean square, and the projection on the result; step and
    reference may differ by four times the mean of a measure (each may be off by it, and
    the step may round twice where the reference rounds once) and 10.1 times its
    standard deviation (one in two million, by Student's t). So a result that is
    ill-conditioned, as Adam's update where gradients are near zero, gets a larger
    tolerance, and only such a result does. Integers, booleans and random keys must be
    equal, unless roundings change them in these runs, as they do quantized values. NaN
    and infinities must be at the same places.

    A step may be less exact than its reference: where that tolerance is not enough, the
    step is run twelve times with such roundings, too. Half of the tolerance is then of
    the reference's runs and half of the step's, which count up to eight times the
    reference's: three bits, where float16 has thirteen less than float32. The report
    says how many times as far rounding moves the step's results, whether they agree or
    not.

    Not detected: a fault that both have; one that is smaller than the rounding of
    the dtypes, as a factor of 1.001 in bfloat16 may be; one on other arguments.

    Args:
      step: the function to check, jitted or not; a scheduled one, for instance.
      reference: a correct function with the same arguments and results.
      *args: arrays, in any pytrees, and objects as the step takes them. They are not
        modified, donated or not.
      steps: how many calls.
      carry: positions of the arguments that are results of the call before, in the
        order of the results; `()` for none. By default the first results, as long as
        each has the structure, shapes and dtypes of an argument, in order; bare
        numbers are not taken. nnx objects carry their own state. Where nothing is fed
        back, one call is compared.
      static_argnums: positional arguments that are Python values, not arrays.
      static_argnames: the same for keyword arguments.
      script: where to write a Python file that reproduces a difference; nothing is
        written where there is none. `write_script` of the report writes it at any time.
      **kwargs: the step's keyword arguments.

    Returns:
      A `CheckReport`, which is true where all results agree.

    Raises:
      TypeError: no function, an argument that is a shape and no array.
      ValueError: the results have different structures, shapes or dtypes; `carry` names
        an argument that no result is like.

    Example::

      scheduled = jaxmem.schedule(step, donate_argnums=0)
      print(jaxmem.check(scheduled, step, state, batch))

    Source: Parker, Monte Carlo Arithmetic (1997); Higham, Accuracy and Stability of
    Numerical Algorithms (2nd ed., chapters 3 and 4), for the terms of a sum; Higham and
    Mary, A new approach to probabilistic rounding error analysis (2019), for the square
    root.
    """
    check_callable("step", step)
    check_callable("reference", reference)
    steps = check_int("steps", steps, 1)
    places = () if carry is None else check_places(carry=carry)
    asked = None if carry is None else [n for n in places if isinstance(n, int)]
    if asked is not None and len(asked) < len(places):
        raise wrong_type("carry", carry, "positions of arguments")
    static = check_static(static_argnums, static_argnames)
    _check_arrays(args, kwargs)
    comparison = StepComparison(reference, (args, kwargs), static, steps, asked)
    report = compared(step, comparison)
    if script is not None and not report.passed:
        report.write_script(script)
    return report


def compared(
    step: Callable, comparison: StepComparison, notes: Sequence[str] = ()
) -> CheckReport:
    """The report of a step beside a reference, which several steps may share.

    Args:
      step: the function to check.
      comparison: the reference with its arguments.
      notes: sentences for the report.
    """
    reference, arguments = comparison.reference, comparison.arguments
    scheduled = rewritable(step)
    # of a scheduled step the passes tell more
    differences = comparison.differences(step, explain=scheduled is None)
    leaves = differences.leaves
    found, guilty, why = FirstModule(), (), ""
    if worst := next((leaf for leaf in leaves if leaf.ratio > 1), None):
        found = _first_module(step, comparison, leaves, worst)
        if scheduled is not None:
            guilty, why = guilty_passes(scheduled, arguments, _differs(comparison))
    roundings = differences.note or roundings_told(leaves)
    said = (roundings, found.note, why, _nans(leaves), *notes)
    return CheckReport(
        _name(step),
        _name(reference),
        jax.default_backend(),
        comparison.steps,
        _carried(comparison),
        leaves,
        found.path,
        found.where,
        guilty,
        tuple(note for note in said if note),
        Reproduction(step, comparison),
    )


def _differs(comparison: StepComparison) -> Callable[[Callable], bool]:
    def differs(step: Callable) -> bool:
        return comparison.differences(step).share > 1

    return differs


def _first_module(
    step: Callable,
    comparison: StepComparison,
    leaves: Sequence[LeafDifference],
    worst: LeafDifference,
) -> FirstModule:
    """At the arguments of the first step after which a result differs."""
    first = min(leaf.step for leaf in leaves if leaf.ratio > 1)
    try:
        arguments = comparison.arguments_at(first - 1)
        if (scheduled := rewritable(step)) is not None:  # as for these arguments
            args, kwargs = copied(comparison.arguments)
            step = scheduled.settled(*args, **kwargs)
        found = first_module(step, comparison.reference, arguments, comparison.static)
    except Exception as error:
        kind = type(error).__name__
        found = FirstModule(note=f"no module's values could be read: {kind}: {error}")
    if not found.path:
        return FirstModule(note=f"{found.note}; the first result is {worst.name}")
    return found


def _carried(comparison: StepComparison) -> str:
    carry = comparison.carry
    if not carry:
        return "nothing is fed back: one step was compared"
    if comparison.steps == 1:
        return ""
    fed = [f"argument {position}" for position, _ in carry.pairs]
    fed += ["the objects that the step updates"] if carry.objects else []
    return f"each step was given the results of the one before: {', '.join(fed)}"


def _nans(leaves: Sequence[LeafDifference]) -> str:
    named = [leaf.name for leaf in leaves if leaf.nans]
    if not named:
        return ""
    return f"NaN in both, at the same places: {', '.join(named[:5])}"


def _name(step: Callable) -> str:
    return getattr(step, "__name__", None) or type(step).__name__


def _check_arrays(args: tuple, kwargs: dict[str, Any]) -> None:
    for path, leaf in jax.tree.leaves_with_path((args, kwargs)):
        if isinstance(leaf, jax.ShapeDtypeStruct):
            name = f"args{jax.tree_util.keystr(path[1:])}"
            raise wrong_type(name, leaf, "an array: both steps are run")
        if jaxprs.is_abstract(leaf):
            name = f"args{jax.tree_util.keystr(path[1:])}"
            raise wrong_type(name, leaf, "an array that is known, outside of jax.jit")
