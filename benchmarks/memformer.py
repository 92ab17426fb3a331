"""Replay through time: Memformer over 64 segments, in the three forms of the example.

    python -m benchmarks.memformer

The step of `examples/memformer.py` with Adam: 64 segments of 8 x 128 tokens, 4 layers
of width 512, 32 memory slots, float32; parameters and moments donated. "plain" is the
step as it is, "own replay" the same with `jax.checkpoint` around a segment (the paper's
memory replay back-propagation), "schedule" the plain step through `jaxmem.schedule`,
whose budget is the peak of "own replay".
"""

import functools
import sys

import jaxmem
from benchmarks._common import MIB, publish_some, size_and_ms
from examples.memformer import LARGE, REPLAY, least_budget, make_step, plain, shapes

TARGET = "h100"
COLUMNS = ("form", "state MiB", "temp MiB", "peak MiB", "predicted ms")
FORMS = {"plain": plain, "own replay": REPLAY, "schedule": plain}


def measure(form: str):
    step, how = make_step(LARGE, FORMS[form]), {"donate_argnums": 0}
    if form == "schedule":
        budget = least_budget(LARGE, TARGET)
        how |= {"target": TARGET}
        step, how = jaxmem.schedule(step, budget, **how), {}
    report = jaxmem.estimate(step, *shapes(LARGE), target=TARGET, **how)
    sizes = report.argument_bytes / MIB, report.temp_bytes / MIB
    return *sizes, *size_and_ms(report, "peak_bytes")


if __name__ == "__main__":
    cases = {(form,): functools.partial(measure, form) for form in FORMS}
    publish_some("memformer", COLUMNS, cases, sys.argv[1:])
