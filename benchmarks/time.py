"""Predicted seconds beside those that an H200 has taken, and beside XLA's for TPUs.

The steps' modules and the times of their kernels are in results/, from
`benchmarks.device`. Predictions are made anew from the modules' text. A kernel is
matched with its instruction by name; XLA runs one kernel for all fusions that are the
same, and calls cuBLAS and copies by other names, so that kinds are compared by sums
over a step, and single kernels only where a name is known.

No TPU has been timed. Its steps are held to the cycles that XLA's own cost model has
written into their modules; what XLA does not estimate is in the predicted step alone.

XLA has a cost model of GPUs, too, for single kernels, without their launches. It is
compared kind by kind: of products and Triton's fusions it knows little.
"""

import dataclasses
import statistics
from collections import defaultdict
from collections.abc import Sequence

from scipy import stats

from benchmarks._common import publish
from benchmarks.readings import xla_costs as _xla_costs
from benchmarks.readings.traces import Trace, by_instruction, plain_name, traces
from benchmarks.readings.xla_costs import COSTS, CYCLES, Costed, costed
from jaxmem.chips import rates_of
from jaxmem.memory.buffers import parse_hlo
from jaxmem.memory.buffers.hlo import Hlo
from jaxmem.memory.time.products import called_targets
from jaxmem.memory.time.schedule import TimedKernel, timed, total

CHIP = "h200"
COLUMNS = ("chip", "of", "what", "measured", "predicted", "ratio", "median ratio")
LEAST = 1e-6  # seconds: a kernel that takes less is hardly more than its launch
GAP = 3e-7  # seconds between kernels, which the profiler does not count
ALONE = "Adam"  # not a policy: another step
PALLAS = "mosaic_gpu"  # in the names of kernels that Pallas has compiled
_FIRST = {"loop": "loops", "input": "transpositions"}

Sums = dict[str, list[float]]  # kind -> [measured, predicted seconds]
_BY_ITSELF = {"fusion": "fusions", "copy": "copies"}  # of TPUs; other operations else


def predicted(trace: Trace) -> tuple[Hlo, list[TimedKernel]]:
    """The kernels of a step, as the library times them."""
    hlo = parse_hlo(trace.module)
    return hlo, timed(hlo, rates_of(CHIP)).kernels


def kind_of(hlo: Hlo, one: TimedKernel) -> str:
    """What a kernel is, by its instruction."""
    made = hlo.instruction(one.name)
    if made.opcode in ("copy", "fusion-start"):
        return "copies"
    if any(PALLAS in target for target in called_targets(hlo, made)):
        return "Pallas's"
    if one.flops:
        return "products"
    if '"kind":"__triton"' in made.attributes:
        return "Triton's"
    return _by_name(made.name)


def _by_name(name: str) -> str:
    """What a kernel is, by its name alone."""
    if PALLAS in name:
        return "Pallas's"
    if name.startswith(("nvjet", "cudnn", "gemm_fusion")):
        return "products"
    if name.lower().startswith("memcpy"):
        return "copies"
    if name.startswith("input") and "reduce" in name:
        return "sums"
    return _FIRST.get(name.split("_")[0], "others")


def compared(trace: Trace) -> tuple[float, Sums, dict[str, list[float]]]:
    """Predicted ms of a step, sums by kind, and ratios of single kernels by kind."""
    hlo, kernels = predicted(trace)
    plain = {plain_name(one.name): one for one in kernels}
    sums: Sums = defaultdict(lambda: [0.0, 0.0])
    ratios: dict[str, list[float]] = defaultdict(list)
    for one in kernels:
        kind = kind_of(hlo, one)
        sums[kind][1] += one.times * (one.seconds - GAP)
    for name, (times, took) in by_instruction(trace.kernels).items():
        one = plain.get(name)
        kind = kind_of(hlo, one) if one else _by_name(name)
        sums[kind][0] += took
        if one and one.seconds > GAP:
            ratios[kind].append((one.seconds - GAP) * times / took)
    return 1e3 * total(kernels), sums, ratios


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Spearman's."""
    return float(stats.spearmanr(one, other).statistic)


def rows() -> list[tuple]:
    """Steps, kinds of kernels, and a summary."""
    steps, kinds, ratios = [], defaultdict(lambda: [0.0, 0.0]), defaultdict(list)
    for trace in traces():
        ms, sums, found = compared(trace)
        steps.append((trace.name, trace.ms, ms))
        for kind, values in sums.items():
            kinds[kind] = [
                a + 1e3 * b for a, b in zip(kinds[kind], values, strict=True)
            ]
        for kind, values in found.items():
            ratios[kind] += values
    made = [("step, ms", n, took, said, said / took, "") for n, took, said in steps]
    for kind, (took, said) in sorted(kinds.items(), key=lambda kv: -kv[1][0]):
        middle = statistics.median(ratios[kind]) if ratios[kind] else ""
        made.append(("kernels, ms", kind, took, said, said / took, middle))
    return [(CHIP, *row) for row in made + summary(steps)]


def estimated(step: Costed) -> tuple[float, float, Sums]:
    """XLA's and predicted ms of a step for a TPU, and sums by kind of operation."""
    hlo, rates = parse_hlo(step.module), rates_of(step.chip)
    sums: Sums = defaultdict(lambda: [0.0, 0.0])
    counted = {one.name for one in timed(hlo, rates).kernels}
    for one in timed(hlo, dataclasses.replace(rates, few=-1)).kernels:
        of_xla = _xla_costs.by_cycles(hlo, one, rates)
        found = sums[_kind_on_tpu(hlo, one) if of_xla else "not estimated"]
        found[0] += one.times * of_xla
        found[1] += one.times * one.seconds * (one.name in counted)
    of_xla, said = (1e3 * sum(column) for column in zip(*sums.values(), strict=True))
    return of_xla, said, sums


def _kind_on_tpu(hlo: Hlo, one: TimedKernel) -> str:
    opcode = hlo.instruction(one.name).opcode
    return "products" if one.flops else _BY_ITSELF.get(opcode, "by themselves")


def beside_xla(step: Costed) -> dict[str, list[tuple[float, float, float]]]:
    """Kind -> (times, XLA's, predicted seconds without launches) of a GPU's kernels."""
    hlo, rates = parse_hlo(step.module), rates_of(step.chip)
    found = defaultdict(list)
    for one in timed(hlo, rates).kernels:
        of_xla = _xla_costs.by_cost(hlo, one)
        if of_xla > LEAST:
            said = one.times, of_xla, one.seconds - rates.launch
            found[kind_of(hlo, one)].append(said)
    return found


def gpu_rows() -> list[tuple]:
    """Kernels of all steps by kind: what they take together, and the median ratio."""
    kinds = defaultdict(list)
    for step in costed(COSTS):
        for kind, kernels in beside_xla(step).items():
            kinds[step.chip, kind] += kernels
    made = []
    for (chip, kind), kernels in kinds.items():
        of_xla, said = (1e3 * sum(one[0] * one[k] for one in kernels) for k in (1, 2))
        middle = statistics.median(one[2] / one[1] for one in kernels)
        made.append(
            (chip, "XLA's kernels, ms", kind, of_xla, said, said / of_xla, middle)
        )
    return made


def tpu_rows() -> list[tuple]:
    """Steps, kinds of operations and a summary of each TPU."""
    found: dict[str, list] = defaultdict(list)
    for step in costed(CYCLES):
        found[step.chip].append((step.name, *estimated(step)))
    return [(chip, *row) for chip, steps in found.items() for row in _of_tpu(steps)]


def _of_tpu(steps: list[tuple[str, float, float, Sums]]) -> list[tuple]:
    plain = [(name, of_xla, said) for name, of_xla, said, _ in steps]
    made = [("XLA's step, ms", *one, one[2] / one[1], "") for one in plain]
    kinds: Sums = defaultdict(lambda: [0.0, 0.0])
    for *_, sums in steps:
        for kind, (of_xla, said) in sums.items():
            kinds[kind][0] += 1e3 * of_xla
            kinds[kind][1] += 1e3 * said
    for kind, (of_xla, said) in sorted(kinds.items(), key=lambda kv: -kv[1][0]):
        ratio = said / of_xla if of_xla else ""
        made.append(("XLA's operations, ms", kind, of_xla, said, ratio, ""))
    return made + summary(plain)


def summary(steps: list[tuple[str, float, float]]) -> list[tuple]:
    """The median and the worst ratio, and rank correlations over policies."""
    of = [said / took for _, took, said in steps]
    worst = max(of, key=lambda ratio: abs(ratio - 1))
    made = [("ratio", "median of the steps", "", "", statistics.median(of), "")]
    made.append(("ratio", "the step that is furthest off", "", "", worst, ""))
    for model, pairs in by_model(steps).items():
        found = rank_correlation(*zip(*pairs, strict=True))
        made.append(("rank correlation", model, "", "", found, ""))
    return made


def by_model(steps: list[tuple[str, float, float]]) -> dict[str, list]:
    """Model -> (measured, predicted) of its policies."""
    found: dict[str, list] = defaultdict(list)
    for name, *values in steps:
        model, shape, policy = name.split(", ", 2)
        if policy != ALONE:
            found[f"{model}, {shape}"].append(tuple(values))
    return found


if __name__ == "__main__":
    publish("time", COLUMNS, rows() + gpu_rows() + tpu_rows())
