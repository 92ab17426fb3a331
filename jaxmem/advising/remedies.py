"""What takes less than a step does: asked of its equations, nothing is compiled.

The rewriter says what `jaxmem.substitute` would find in the function that was
differentiated, the passes of `jaxmem.schedule` what they make of the step. Of both the
peak is predicted as it is of the step itself, and set against the compiled one.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxmem import _compat
from jaxmem._bytes import format_bytes
from jaxmem._module_path import merge_numbered, of_user, parse_op_name
from jaxmem.ir import jaxprs
from jaxmem.ir.auto_axes import explicit_types, on_auto_axes, without_types
from jaxmem.ir.graph import by_shape, is_transposed
from jaxmem.ir.shards import InputShardings, of_shardings
from jaxmem.memory.report.advice import AdvisedStep
from jaxmem.rewriting import KeptInside, kept_inside, with_losses
from jaxmem.scheduling import operations_of
from jaxmem.scheduling.predict.operations import as_compiled, compiled_peak
from jaxmem.scheduling.predict.tpu import is_tpu
from jaxmem.scheduling.search.expected import ExpectedPeaks, expected_peaks

_LEAST = 0.05  # of the peak: what saves less is not told
_NAMED = 3  # formulas in a line
# What compiled peaks of schedules were above what was expected of them, on the programs
# of the tests: of the temporaries, and of the peak as it was.
_WRONG, _OFF = 0.4, 0.01
_UNITS = (20, "MiB"), (10, "KiB"), (0, "B")


@dataclass(frozen=True)
class Remedy:
    """A call, and what the step is expected to take with it.

    Attributes:
      call: what to write.
      peak_bytes: of the step with it.
      why: what is released or done.
    """

    call: str
    peak_bytes: int
    why: str


def advice_on(step: AdvisedStep) -> tuple[str, ...]:
    """A sentence for each remedy."""
    return tuple(
        f"about {format_bytes(one.peak_bytes)} with {one.call}: {one.why}"
        for one in remedies_for(step)
    )


def remedies_for(step: AdvisedStep) -> list[Remedy]:
    """What takes clearly less than the step, what costs no time before the rest."""
    if step.peak_bytes - step.argument_bytes < _LEAST * step.peak_bytes:
        return []
    step = replace(step, closed=without_types(step.closed, explicit_types(step.closed)))
    with on_auto_axes():
        return _remedies(step)


def _remedies(step: AdvisedStep) -> list[Remedy]:
    peaks = expected_peaks(step.closed, step.donated, step.specs, step.target)
    most = (1 - _LEAST) * step.peak_bytes
    found = [*_substituted(step, peaks), *_scheduled(step, peaks)]
    return [one for one in found if one.peak_bytes < most]


def _expected(step: AdvisedStep, peaks: ExpectedPeaks, predicted: float) -> int:
    """What the compiled peak becomes where the predicted one becomes this."""
    # Arguments stay. The rest changes as it is predicted to, or less: where the peak is
    # below its prediction, what makes the difference may be gone from both.
    before, after = peaks.plain - peaks.arguments, predicted - peaks.arguments
    rest = step.peak_bytes - step.argument_bytes
    more = max(1.0, rest / max(before, 1)) * max(after, 0)
    return round(step.argument_bytes + more)


def _scheduled(step: AdvisedStep, peaks: ExpectedPeaks) -> Iterator[Remedy]:
    target = f'target="{step.target}"'
    free, least = (_expected(step, peaks, p) for p in (peaks.free, peaks.least))
    free += round(_OFF * step.peak_bytes)  # what is small beside it is not modelled
    if peaks.free < peaks.plain:
        why = "what it recomputes is cheap"
        yield Remedy(f"jaxmem.schedule(step, {target})", free, why)
    budget = _surely(step, least)
    if budget < (1 - _LEAST) * min(free, step.peak_bytes):
        why = f"it takes time, because {peaks.slower}"
        call = f'jaxmem.schedule(step, budget="{_written(budget)}", {target})'
        yield Remedy(call, budget, why)


def _surely(step: AdvisedStep, size: int) -> int:
    """A budget that is met where this peak is expected."""
    wrong = _WRONG * (size - step.argument_bytes) + _OFF * step.peak_bytes
    return round(size + wrong)


def _written(size: int) -> str:
    """A budget of three digits or more that is no smaller."""
    unit, name = next((2**k, n) for k, n in _UNITS if size >= 100 * 2**k or k == 0)
    return f"{-(-size // unit)}{name}"


def _substituted(step: AdvisedStep, peaks: ExpectedPeaks) -> Iterator[Remedy]:
    aliases = by_shape(step.closed, step.donated)
    named = tuple(getattr(spec, "sharding", None) for spec in step.specs)
    shardings = of_shardings(step.closed, named if any(named) else ())
    how = is_tpu(step.target), shardings
    kept, saved = _released(with_losses(step.closed), aliases, *how)
    if saved > 0:
        peak = _expected(step, peaks, peaks.plain - saved)
        yield Remedy("jaxmem.substitute", peak, f"it does not keep {_inside(kept)}")


def _released(
    closed: Any, aliases: Any, tpu: bool, shardings: InputShardings | None = None
) -> tuple[list[tuple[KeptInside, int]], int]:
    """What formulas keep with its bytes, and what less the predicted peak is."""
    ops = operations_of(closed, aliases, tpu=tpu, shardings=shardings)
    if not any(map(is_transposed, ops.closed.eqns)):
        bodies = (b for eqn in ops.closed.eqns for b in jaxprs.bodies(eqn))
        inside = (b for b in bodies if any(map(is_transposed, jaxprs.walk(b))))
        closed = (
            b if hasattr(b, "consts") else _compat.ClosedJaxpr(b, ()) for b in inside
        )
        found = [_released(with_losses(body), {}, tpu) for body in closed]
        return max(found, key=lambda pair: pair[1], default=([], 0))
    graph = as_compiled(ops, tpu)
    values, kept = list(graph.values), []
    for one in kept_inside(ops.closed):
        number = ops.values.get(one.variable)
        if number is not None:
            kept.append((one, values[number].bytes))
            values[number] = replace(values[number], bytes=0)
    less = replace(graph, values=tuple(values))
    more = sum(one.more for one, _ in kept)
    return kept, compiled_peak(graph) - compiled_peak(less) - more


def _inside(kept: Sequence[tuple[KeptInside, int]]) -> str:
    """Bytes by formula and module, the largest first."""
    merged = merge_numbered(_module(one) for one, _ in kept)
    sizes: Counter[tuple[str, str]] = Counter()
    for one, size in kept:
        sizes[one.site.pattern, merged[_module(one)]] += size
    parts = [
        f"{format_bytes(size)} inside {pattern}" + (f" ({module})" if module else "")
        for (pattern, module), size in sizes.most_common(_NAMED)
    ]
    left = len(sizes) - len(parts)
    return ", ".join(parts) + (f" and what {left} more have inside" if left else "")


def _module(one: KeptInside) -> str:
    """The modules that a formula is in; its line where there are none."""
    path = parse_op_name(f"{one.site.path}/{one.site.pattern}").module_path
    return of_user(path) or one.site.source.rsplit("/", 1)[-1].split(" (")[0]
