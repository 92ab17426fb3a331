"""How each results file's rows are measured anew: what `benchmarks.recheck` runs."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jaxmem
from benchmarks import (
    accumulation,
    bert,
    blocks,
    cross_entropy,
    fewbit,
    kernels,
    layers,
    predict,
    release,
    scheduling,
    storage,
)
from benchmarks._common import MIB
from benchmarks.models.transformers import BertConfig
from jaxmem import planning

Row = Mapping[str, str]


class Check(NamedTuple):
    """A results file.

    Attributes:
      file: its name in results/, without the version.
      keys: the columns that say which row it is.
      columns: those that are measured.
      measure: a row's figures, in the order of `columns`.
      cheap: whether a row is among those that are measured by default: compiles for
        the GPU end at the buffer assignment, seconds for a stack of layers, and some
        rows are of graphs that need no compile.
    """

    file: str
    keys: Sequence[str]
    columns: Sequence[str]
    measure: Callable[[Row], Sequence[float]]
    cheap: Callable[[Row], bool] = lambda row: False


def on_gpu(row: Row) -> bool:
    return row.get("target", row.get("chip")) == "h100"


def of_layers(row: Row):
    for stack, name, (loss, args), _ in layers.cases():
        if (stack, name) == (row["stack"], row["layer"]):
            return layers.taken(stack, loss, args, row["target"])[:1]
    raise LookupError("benchmarks.layers has no such case")


def of_storage(row: Row):
    for name, step, args in storage.STACKS[row["stack"]]():
        if name == row["kept"]:
            return [storage.temp_and_ms(step, args)[0]]
    raise LookupError("benchmarks.storage has no such case")


def of_fewbit(row: Row):
    activation = fewbit.ACTIVATIONS[row["activation"]]
    return [fewbit.temp_and_ms(activation, row["target"])[0]]


def of_cross_entropy(row: Row):
    variants = {name: (loss, axis) for name, loss, axis, _ in cross_entropy.variants()}
    variants["the same, kernels"] = (cross_entropy.kernels, 1)
    return [cross_entropy.temp_and_ms(*variants[row["loss"]], row["target"])[0]]


def of_kernels(row: Row):
    return kernels.compile_row(row["kernel"], row["chip"])[3:5]


def of_bert(row: Row):
    return bert.taken(dict(bert.models(BertConfig()))[row["model"]], row["target"])[:1]


def of_blocks(row: Row):
    for name, step, args in blocks.variants(row["model"]):
        if name == row["how"]:
            report = jaxmem.estimate(step, *args, target=blocks.TARGET)
            return [report.temp_bytes / MIB]
    raise LookupError("benchmarks.blocks has no such case")


def of_release(row: Row):
    case = row["remat"] == "a layer", row["substituted"] == "yes", row["target"]
    sizes = ((r.temp_bytes, r.peak_bytes) for r in release.measure(*case))
    return [size / MIB for pair in sizes for size in pair]


def of_predict(row: Row):
    made = predict.row(row["step"], row["target"], "not compiled", "")
    return made[2:4]


def of_order(row: Row):
    """In the order of the program and in XLA's: ours is that of a timed search."""
    scanned = row["layers"] == "scanned"
    case = scheduling.Case(row["model"], int(row["batch"]), scanned)
    graph = case.operations()[0].graph
    made = (scheduling.GREEDY[name](graph) for name in ("program", "XLA"))
    return [planning.peak(graph, order) / MIB for order in made]


def of_unrolled(row: Row):
    return release.unrolled_row(row["target"])[::2]


def of_accumulation(row: Row):
    report = accumulation.measure(row["variant"], int(row["N"]), row["target"])
    return [report.temp_bytes / MIB, report.peak_bytes / MIB]


FEW = 200  # operations: traced and ordered in a second
QUICK = ("alexnet", "dense", "vgg16", "gpt2_small, 1, scanned")  # to predict
_TEMP = ("temp MiB",)
_BOTH = [
    f"{who}: {what} MiB" for who in ("XLA", "scheduled") for what in ("temp", "peak")
]
CHECKS = (
    Check("fewbit-scan", ("activation", "target"), _TEMP, of_fewbit, on_gpu),
    Check("layers", ("stack", "layer", "target"), _TEMP, of_layers, on_gpu),
    Check("cross_entropy", ("loss", "target"), _TEMP, of_cross_entropy, on_gpu),
    Check(
        "storage",
        ("stack", "kept"),
        _TEMP,
        of_storage,
        lambda row: row["stack"] != "BERT-Large",
    ),
    Check("kernels", ("kernel", "chip"), ("XLA MiB", "kernel MiB"), of_kernels, on_gpu),
    Check(
        "release_unrolled",
        ("target",),
        ("XLA: temp MiB", "scheduled: temp MiB"),
        of_unrolled,
        on_gpu,
    ),
    Check(
        "predict",
        ("step", "target"),
        ("state MiB", "predicted MiB"),
        of_predict,
        lambda row: row["step"].startswith(QUICK),
    ),
    Check(
        "scheduling_order",
        ("model", "layers", "batch"),
        ("program", "XLA"),
        of_order,
        lambda row: int(row["operations"]) < FEW,
    ),
    Check("bert", ("model", "target"), _TEMP, of_bert, on_gpu),
    Check("blocks", ("model", "how"), _TEMP, of_blocks),
    Check("release", ("remat", "substituted", "target"), _BOTH, of_release),
    Check(
        "accumulation",
        ("variant", "N", "target"),
        ("temp MiB", "peak MiB"),
        of_accumulation,
    ),
)
