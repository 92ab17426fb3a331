"""How long `jaxmem.schedule` looks for a step that fits into 60 % of its peak.

    python -m benchmarks.search
    python -m benchmarks.search BERT   # rows that have it; others stay

Wall time on the machine that runs it, compiles included, without what is on disk: of
BERT-Large's gradient, its layers in a scan, and of training steps of a GPT in nnx whose
layers are written out. "at most" is what we mean to reach on two cores.
"""

import functools
import os
import sys
import tempfile
from collections.abc import Callable, Sequence

import jaxmem
from benchmarks._common import MIB, publish_some
from benchmarks.bert import gradient
from benchmarks.models.transformers import Bert, BertConfig
from benchmarks.models.written_out import training

SHARE = 0.6  # of the plain step's peak
SCANNED = {12: 15, 24: 20}  # layers -> seconds at most
WRITTEN_OUT = {4: 30, 8: 45}
COLUMNS = (
    *("model", "chip", "plain MiB", "budget MiB", "found MiB"),
    *("compiles", "seconds", "at most"),
)


def searched(
    made: Callable[[], tuple], chip: str, donated: Sequence[int], most: int
) -> list[str]:
    """The cells of a row behind its name."""
    step, args = made()
    how = {"target": chip, "donate_argnums": donated, "cache": False}
    plain = jaxmem.estimate(step, *args, **how).peak_bytes
    budget = int(SHARE * plain)
    plan = jaxmem.schedule(step, budget, **how).plan(*args)
    sizes = (plain, budget, plan.scheduled.peak_bytes)
    mib = [f"{size / MIB:.0f}" for size in sizes]
    return [*mib, str(len(plan.tried)), f"{plan.planning_seconds:.0f}", str(most)]


def cases() -> dict[tuple[str, str], Callable[[], list[str]]]:
    found = {}
    for layers, most in SCANNED.items():
        made = functools.partial(gradient, Bert(BertConfig(layers=layers)))
        name = f"BERT-Large's gradient, {layers} layers in a scan"
        found[name, "h100"] = functools.partial(searched, made, "h100", (), most)
    for layers, most in WRITTEN_OUT.items():
        made = functools.partial(training, layers)
        name = f"GPT in nnx with AdamW, {layers} layers written out"
        found[name, "l4"] = functools.partial(searched, made, "l4", (0, 1), most)
    return found


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as cache:
        os.environ["JAXMEM_CACHE_DIR"] = cache
        publish_some("search", COLUMNS, cases(), sys.argv[1:])
