"""`lint`: every rule, over one step."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxmem import _compat
from jaxmem._checks import check_callable, check_donated, check_float, check_static
from jaxmem.chips import Target, get_target
from jaxmem.frameworks import pure_call
from jaxmem.linting._report import LintReport, merged
from jaxmem.linting._subject import Subject, levels
from jaxmem.linting.rules import RULES
from jaxmem.linting.rules.known_faults import is_known, not_looked_at, telling
from jaxmem.memory import CompileError
from jaxmem.memory.compile import compile_program, traced_call

Places = int | Sequence[int]
Names = str | Sequence[str]


def lint(
    step: Callable,
    *args: Any,
    donate_argnums: Places = (),
    donate_argnames: Names = (),
    static_argnums: Places = (),
    static_argnames: Names = (),
    target: str | Target | None = None,
    timeout: float = 600,
    **kwargs: Any,
) -> LintReport:
    """Finds what makes a training step take more memory or time than it needs.

    The step is traced, not run. The findings are:

    - *unmatched name*: a checkpoint policy saves or offloads a name that no residual
      has;
    - *policy None*: a `jax.checkpoint` without a policy, which saves nothing;
    - *policy saves all*: `save_anything_except_these_names` on the versions of jax
      where it saves those too;
    - *whole loss*: a `jax.checkpoint` around (nearly) the whole forward pass;
    - *recomputation undone*: the compiler merged what a checkpoint recomputes with the
      results of the forward pass (only with `target`);
    - *not donated*, *donation not used*, *donated twice*, *donated and read*;
    - *stacked twice*: a scan that stacks one value several times;
    - *stacked as read*: a scan that stacks inputs which it does not change;
    - *stacked wide*: a scan that stacks what only a narrower copy of is used;
    - *unused gradient*: the gradient of something that is not trained;
    - *wide copy*: a float32 copy of a bfloat16 value, kept for the backward pass;
    - *dropout mask*: a mask of random bits kept for the backward pass;
    - *lost batch axis*: activations of a sharded step that XLA moves to another axis
      than that of the examples;
    - *misread from the host*: a scan that goes backwards through arrays in the host's
      memory, as over offloaded residuals, on versions of jax where GPUs read it
      forwards (with `target`, any wrong slice of host memory);
    - *padded*: an array that a TPU's tiles make several times as large as its elements
      (only with `target`);
    - *ragged copies*: a `jax.lax.ragged_dot` on a GPU, whose compiler copies all rows
      for each group (only with a GPU as `target`);
    - *known fault*: a known bug of this version of jax, on `target` or else on
      any platform, with a link to the report.

    Bytes are those of the arrays as traced, on all devices together: a compiler may
    fuse some of them away. Findings under a kibibyte are left out, and so is what ops
    of this package do by design. A finding names the innermost line outside of jax,
    flax and this package.

    Args:
      step: any function that `jax.jit` takes, jitted or not, with its backward pass in
        it; a jitted one brings its own donated and static arguments along.
      *args: arrays or `jax.ShapeDtypeStruct`, in any pytrees. One buffer donated twice
        is found on arrays alone.
      donate_argnums: positional arguments whose buffers the step may reuse.
      donate_argnames: the same for keyword arguments.
      static_argnums: positional arguments that are Python values, not arrays.
      static_argnames: the same for keyword arguments.
      target: a chip of `jaxmem.targets()` to compile for; None compiles nothing, and
        skips checks that need the compiled step.
      timeout: seconds that the compile may take.
      **kwargs: the step's keyword arguments.

    Returns:
      A `LintReport`.

    Raises:
      TypeError: no function, a step that cannot be traced, an argument that is no
        array.
      ValueError: an unknown target, arguments that do not fit the step.
      RuntimeError: this installation cannot compile for the target.
      TimeoutError: the compile took longer than `timeout`.

    Example::

      print(jaxmem.lint(step, state, batch, donate_argnums=0))
    """
    check_callable("step", step)
    timeout = check_float("timeout", timeout, above=0)
    donate = check_donated(donate_argnums, donate_argnames)
    static = check_static(static_argnums, static_argnames)
    chip = None if target is None else get_target(target)
    own = step, args, kwargs, donate or None, static
    with telling(), pure_call(*own) as pure:
        traced = traced_call(step, pure, chip)
        compiled, failed = None, ""
        if chip is not None:
            try:
                compiled = compile_program(traced, chip, timeout)
            except CompileError as error:
                failed = str(error)
                if not is_known(failed):
                    raise
    leaves = tuple(jax.tree.leaves((pure.args, pure.kwargs)))
    call, closed = traced.call, traced.traced.jaxpr
    live = _compat.without_dead_code(closed)
    name = None if chip is None else chip.name
    subject = Subject(call, leaves, closed, live, compiled, name, failed)
    findings = [finding for rule in RULES for finding in rule(subject)]
    skipped = []
    if compiled is None:
        why = "it was not compiled" if failed else "no target"
        skipped.append(f"{why}: whether a recomputation was undone is not known")
    if not _has_backward(subject):
        skipped.append("no backward pass in the step: give lint the step that has it")
    skipped += not_looked_at(subject)
    return LintReport(call.name, merged(findings), tuple(skipped))


def _has_backward(subject: Subject) -> bool:
    return any(
        level.is_backward(eqn)
        for level in levels(subject.closed)
        for eqn in level.graph.eqns
    )
