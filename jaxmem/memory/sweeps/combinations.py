"""`sweep`: one call for many sizes of a step, and several chips."""

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jaxmem._checks import check_bool, check_callable, wrong_type, wrong_value
from jaxmem._progress import spinner
from jaxmem.chips import Target, get_target
from jaxmem.memory._estimate import estimate
from jaxmem.memory.compile.answer import DoesNotFit
from jaxmem.memory.sweeps.result import Sweep
from jaxmem.memory.sweeps.swept_step import SweptStep


def sweep(
    make: Callable[..., tuple],
    over: Mapping[str, Sequence[Any]],
    target: str | Target | Sequence[str | Target] | None = None,
    *,
    progress: bool = True,
    **options: Any,
) -> Sweep:
    """Estimates a step for every combination of some sizes, on one chip or several.

    Nothing is run: `make` may return shapes for arrays. Combinations come in the order
    of `over`, the last name changing fastest, and for each of them all chips.

    Args:
      make: from a value of each name, as keyword arguments, to `(step, args)` or
        `(step, args, options)`; the options are those of `jaxmem.estimate` for this
        step.
      over: name -> the values to try: `{"layers": [2, 4], "batch": [8, 16, 32]}`.
      target: a name of `jaxmem.targets()`, or several; "cpu" by default.
      progress: show what is compiled, where the output is a terminal.
      **options: of `jaxmem.estimate` for every step, such as `donate_argnums`.

    Returns:
      A `Sweep`: prints as a table, and draws itself. A step that the chip's compiler
      refuses for its memory is a row that says so, and no error.

    Raises:
      TypeError: `over` is no mapping; `make` cannot be called, or returns no tuple.
      ValueError: no name, no values, or other names than `make` has parameters for.
      RuntimeError: see `jaxmem.estimate`.

    Example::

      def make(width, batch):
          w = jax.ShapeDtypeStruct((width, width), jnp.float32)
          x = jax.ShapeDtypeStruct((batch, width), jnp.float32)
          return jax.grad(lambda w, x: jnp.tanh(x @ w).sum()), (w, x)

      print(jaxmem.sweep(make, {"width": [64, 128], "batch": [8, 16]}))
    """
    check_callable("make", make)
    check_bool("progress", progress)
    values = _checked(make, over)
    chips = [get_target(one) for one in _several(target)]
    names = tuple(values)
    combinations = list(itertools.product(*values.values()))
    found: list[SweptStep] = []
    with spinner(progress, f"{len(combinations) * len(chips)} steps") as tell:
        for combination in combinations:
            sizes = dict(zip(names, combination, strict=True))
            step, args, own = _made(make, sizes)
            for chip in chips:
                tell(", ".join([*(f"{k}={v}" for k, v in sizes.items()), chip.name]))
                found.append(_swept(sizes, chip, step, args, options | own))
    return Sweep(names, tuple(found))


def _swept(
    sizes: dict[str, Any], chip: Target, step: Callable, args: tuple, options: dict
) -> SweptStep:
    try:
        report = estimate(step, *args, target=chip, **options)
    except DoesNotFit as error:
        return SweptStep(sizes, chip.name, chip.memory_bytes, None, str(error))
    return SweptStep(sizes, chip.name, chip.memory_bytes, report)


def _several(target: Any) -> Iterator[str | Target | None]:
    if isinstance(target, Sequence) and not isinstance(target, str):
        if not target:
            raise wrong_value("target", target, "a name, or at least one")
        yield from target
    else:
        yield target


def _checked(make: Callable, over: Any) -> dict[str, list[Any]]:
    """The values of each name; `make` has a parameter for all of them."""
    if not isinstance(over, Mapping):
        raise wrong_type("over", over, "a mapping from names to values")
    if not over:
        raise wrong_value("over", over, "at least one name with its values")
    for name, some in over.items():
        if isinstance(some, str) or not isinstance(some, Sequence) or not some:
            raise wrong_value(f"over[{name!r}]", some, "a list of at least one value")
    _check_names(make, over)
    return {name: list(some) for name, some in over.items()}


def _check_names(make: Callable, over: Mapping[str, Any]) -> None:
    """Each name is a parameter, and each parameter without a default is a name."""
    try:
        inspect.signature(make).bind(**over)
    except TypeError as error:
        allowed = f"names of all parameters of `make` without a default: {error}"
        raise wrong_value("over", [*over], allowed) from error


def _made(make: Callable, sizes: dict[str, Any]) -> tuple[Callable, tuple, dict]:
    found = make(**sizes)
    if not isinstance(found, tuple) or len(found) not in (2, 3):
        returned = type(found).__name__
        raise TypeError(
            f"make: returns (step, args) or (step, args, options), got {returned}"
        )
    step, args = found[:2]
    own = found[2] if len(found) > 2 else {}
    return step, args if isinstance(args, tuple) else (args,), own
