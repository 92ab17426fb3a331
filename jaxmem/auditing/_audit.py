"""`audit`: every rule, over the module that the compiler made of one step."""

from collections.abc import Callable, Sequence
from typing import Any

from jaxmem._checks import check_callable, check_donated, check_float, check_static
from jaxmem.auditing._module import Module
from jaxmem.auditing._report import AuditFinding, AuditReport
from jaxmem.auditing.rules import RULES, of_slice
from jaxmem.chips import Target, get_target
from jaxmem.frameworks import pure_call
from jaxmem.memory import MemoryReport
from jaxmem.memory.compile import StepFacts, compile_program, traced_call

_NO_TEXTS = "the compiler dumped no buffer assignment: nothing was checked"


def audit(
    step: Callable,
    *args: Any,
    target: str | Target | None = None,
    donate_argnums: int | Sequence[int] = (),
    donate_argnames: str | Sequence[str] = (),
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    timeout: float = 600,
    **kwargs: Any,
) -> AuditReport:
    """Compiles a step for a target, and checks the compiled module.

    The step is not run. The scheduled module is compared with the compiler's
    buffer assignment, without the compiler's own live ranges. The rules are:

    - *shared_bytes*: values that are live together share no byte;
    - *read_after_update*: a value that is updated in place is not read afterwards;
    - *read_elsewhere*: a fusion that updates an operand in place reads of it only the
      slice that it writes;
    - *two_outputs*: two outputs of one instruction have two buffers;
    - *donations*: a donated argument is given to one output, of its size, and no other
      argument is written;
    - *read_unwritten*: a loop reads no part of a stack before it has written it, where
      XLA was told to leave stacks unfilled;
    - *host_slices*: a GPU takes a slice of the host's memory from where its index says;
    - *collectives*: a sum over devices adds the shards of one part of an array, once;
      no sum is missing; all devices reach a collective on the same branch.

    A finding is a fault of the compiler, whose consequence is a wrong value. One of
    *collectives* may also be one of the step's own `jax.shard_map`.

    Args:
      step: any function that `jax.jit` takes, jitted or not; a jitted one brings its
        own donated and static arguments along.
      *args: arrays or `jax.ShapeDtypeStruct`, in any pytrees.
      target: a name of `jaxmem.targets()`, "cpu" by default.
      donate_argnums: positional arguments whose buffers the step may reuse.
      donate_argnames: the same for keyword arguments.
      static_argnums: positional arguments that are Python values, not arrays.
      static_argnames: the same for keyword arguments.
      timeout: seconds that the compile may take.
      **kwargs: the step's keyword arguments.

    Returns:
      An `AuditReport`.

    Raises:
      TypeError: no function, a step that cannot be traced, an argument that is no
        array.
      ValueError: an unknown target, arguments that do not fit the step.
      CompileError: the step cannot be compiled for the target.
      RuntimeError: this installation cannot compile for the target.
      TimeoutError: the compile took longer than `timeout`.

    Example::

      print(jaxmem.audit(step, state, batch, target="h100", donate_argnums=0))
    """
    check_callable("step", step)
    timeout = check_float("timeout", timeout, above=0)
    donate = check_donated(donate_argnums, donate_argnames)
    static = check_static(static_argnums, static_argnames)
    chip = get_target(target)
    with pure_call(step, args, kwargs, donate or None, static) as pure:
        traced, options = traced_call(step, pure, chip), pure.own.compiler_options
        compiled = compile_program(traced, chip, timeout, options)
    texts = compiled.hlo, compiled.assignment
    facts = traced.facts(compiled.used, str(options or ""))
    findings = audit_texts(*texts, facts) if all(texts) else ()
    skipped = () if all(texts) else (_NO_TEXTS,)
    return AuditReport(traced.call.name, chip.name, findings, skipped)


def findings_of(report: MemoryReport) -> tuple[AuditFinding, ...]:
    """Findings on the module of a report that was just made.

    Of a report without the compiler's texts only what it says itself is looked at.
    """
    texts = report.compiler_texts()
    if texts is None or not all(texts[:2]):
        return tuple(map(of_slice, report.wrong_slices)) if report.host_bytes else ()
    return audit_texts(*texts)


def audit_texts(
    hlo: str, assignment: str, step: StepFacts | None = None
) -> tuple[AuditFinding, ...]:
    """Findings on a scheduled module and its buffer assignment as XLA dumps them."""
    module = Module(hlo, assignment, step)
    return tuple(finding for rule in RULES for finding in rule(module))
