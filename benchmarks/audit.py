"""The audit over modules that are right: what it finds wrongly, and what it takes.

    python -m benchmarks.audit        # all chips
    python -m benchmarks.audit tpu    # chips that have the word; other rows stay

The steps are those of tests/programs in small, and of tests/auditing/sharded.py on
eight devices. "of a compile" is the time of the audit over that of its compile, of all
modules together: small modules, so that most of both is what every module takes.
"""

import os
import sys
import time
from collections.abc import Iterator
from typing import Any

# before jax is loaded: eight devices of the host stand for those of a mesh
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
)

from benchmarks._common import publish_some
from jaxmem.auditing import audit_texts
from jaxmem.chips import get_target
from jaxmem.frameworks import pure_call
from jaxmem.memory import CompileError
from jaxmem.memory.compile import compile_program, traced_call
from tests.auditing.sharded import STEPS
from tests.programs import PROGRAMS

CHIPS = ("cpu", "t4", "a100", "h100", "b200", "tpu-v4", "tpu-v5e", "tpu-v5p", "tpu-v6e")


def steps() -> Iterator[tuple[str, Any, tuple, tuple[int, ...]]]:
    """(name, step, arguments, donated ones)."""
    for program in PROGRAMS:
        step, args, donate = program.make("small")
        yield str(program), step, args, donate
    for name, make in STEPS.items():
        yield f"{name}, sharded", *make(), ()


def row(chip: str) -> tuple:
    modules = refused = found = 0
    compiling = auditing = 0.0
    for name, step, args, donate in steps():
        start = time.perf_counter()
        with pure_call(step, args, {}, donate or None, ()) as pure:
            traced = traced_call(step, pure, get_target(chip))
            try:
                program = compile_program(traced, get_target(chip), 900)
            except CompileError as error:
                refused += 1
                print(f"{chip}, {name}: {str(error)[:200]}", flush=True)
                continue
        compiled = time.perf_counter()
        facts = traced.facts(program.used)
        findings = audit_texts(program.hlo, program.assignment, facts)
        auditing += time.perf_counter() - compiled
        compiling += compiled - start
        modules, found = modules + 1, found + bool(findings)
        for finding in findings:
            print(f"{chip}, {name}: {finding}", flush=True)
    return modules, refused, found, round(100 * auditing / compiling, 1)


if __name__ == "__main__":
    columns = ("chip", "modules", "not compiled", "with findings", "of a compile %")
    rows = {(chip,): (lambda chip=chip: row(chip)) for chip in CHIPS}
    publish_some("audit", columns, rows, sys.argv[1:])
