"""The table of known faults: to add one, add its row, and a program that has it."""

import re

from jaxmem.faults.finders import cudnn
from jaxmem.faults.finders.lone_scatters import lone_scatters
from jaxmem.faults.finders.partial_tables import cut_before_the_sum
from jaxmem.faults.finders.read_in_loops import read_in_loops
from jaxmem.faults.finders.rolled_updates import rolled_updates
from jaxmem.faults.finders.scattered_sums import scattered_sums
from jaxmem.faults.finders.searched_slices import searched_slices
from jaxmem.faults.finders.small_updates import small_updates
from jaxmem.faults.finders.table_sums import sums_left_behind, sums_of_tables
from jaxmem.faults.record import KnownFault
from jaxmem.ir.host_slices import COPIES, WHAT_TO_DO

_OLD, _MIDDLE, _NEW = (0, 10, 2), (0, 11, 2), (0, 12, 0, 1)
_ALL = _OLD, _MIDDLE, _NEW
_CUDNN_GONE = (
    'use implementation="xla", or jaxmem.ops.dot_product_attention, which gives cuDNN '
    "only what it is right about"
)


def _without(name: str) -> dict[str, str]:
    return {"xla_disable_hlo_passes": name}


SUMS_OF_TABLES = KnownFault(
    report="xla#49143",
    platforms=("cuda", "tpu"),
    affected=(None, _MIDDLE),
    looked_at=_ALL,
    how="compiled for v5e, v4 and H100: the sum over devices is behind the loop, and "
    "the zeros are in it, with libtpu 0.0.42.1 and 0.0.48.1 and on the GPU of both; "
    "with jax 0.12.0.1 it is in the loop",
    consequence="wrong values",
    what="the gradient of a replicated table, added up in a loop over parts of "
    "examples that are sharded over devices: all but one device lose what they add "
    "before the last iteration",
    way_round="put jax.lax.optimization_barrier around the gradient before it is "
    "added, as jaxmem.schedule does, or scale it first, as jaxmem.microbatch does",
    options=_without("while-loop-all-reduce-code-motion"),
    in_program=sums_of_tables,
    in_module=sums_left_behind,
    is_proof=True,
)

FAULTS = (
    KnownFault(
        report="xla#46231",
        platforms=("cuda",),
        affected=(_OLD, (0, 11, 0)),
        looked_at=_ALL,
        how="compiled for H100: the line of each copy is compared with its index",
        consequence="wrong values",
        what="a backward loop over stacks in the host's memory, as of offloaded "
        "residuals: it reads them forwards",
        way_round=WHAT_TO_DO,
        options=_without(COPIES),
        elsewhere="misread from the host",
    ),
    SUMS_OF_TABLES,
    KnownFault(
        report="xla#42481",
        platforms=("cpu", "cuda", "tpu"),
        affected=(None, _OLD),
        looked_at=_ALL,
        how="from the report, on 8 GPUs, where XLA falls back from Shardy to GSPMD; a "
        "program of it is right here on 4 CPUs in all three versions, so only a module "
        "that shows it is told",
        consequence="wrong values",
        what="the gradient of a table sharded by rows, looked up as a `reduced` one: "
        "each device takes its rows before they are summed",
        way_round="look the table up inside jax.shard_map, or reshard it without "
        "`reduced`",
        in_module=cut_before_the_sum,
        is_proof=True,
    ),
    KnownFault(
        report="jax#39100",
        platforms=("cuda",),
        affected=(None, None),
        looked_at=_ALL,
        how="compiled for 4 H100: one buffer has both outputs, in all three versions",
        consequence="wrong values",
        what="one fusion updates two arrays in place that share a buffer, as where "
        "pieces with margins are put together on 4 devices",
        way_round="treat the pieces as one array, reshaped to an axis of pieces, in "
        "place of joining them (a barrier between the two does not help)",
        options=_without("priority-fusion"),
        elsewhere="two_outputs",
    ),
    KnownFault(
        report="xla#49119",
        platforms=("cuda",),
        affected=(None, None),
        looked_at=_ALL,
        how="compiled for H100: the fusion is made in all three versions; what its "
        "code reads is known from the report alone",
        consequence="wrong values",
        what="a slice at a given index (as jnp.roll by one) of an array that is "
        "updated at given indices, by what is computed in the same fusion",
        way_round="put jax.lax.optimization_barrier around the updated array",
        in_module=rolled_updates,
    ),
    KnownFault(
        report="xla#49176",
        platforms=("cpu",),
        affected=(None, None),
        looked_at=_ALL,
        how="run: 96 of 128 elements are wrong in all three versions",
        consequence="wrong values",
        what="an update in place whose update is a shifted slice of its operand, with "
        "a reshape of the result",
        way_round="use jnp.concatenate in place of the update, or reshape before it (a "
        "barrier around the slice does not help before jax 0.11)",
        options=_without("algsimp"),
        elsewhere="read_elsewhere",
    ),
    KnownFault(
        report="jax#40101",
        platforms=("cpu",),
        affected=((0, 11, 1), (0, 11, 1)),
        looked_at=_ALL,
        how="run in all three versions, which are not slow; 0.11.1 is from the report",
        consequence="slow",
        what="an update of less than some 480 bytes in a loop: it writes the whole "
        "array, in each iteration",
        way_round="use jax 0.11.2 or newer, or write several rows at once",
        in_program=small_updates,
    ),
    KnownFault(
        report="xla#45912",
        platforms=("cpu", "cuda"),
        affected=((0, 7, 2), (0, 11, 0)),
        looked_at=_ALL,
        how="by the compiler's bytes, on the CPU and for H100: a copy with jax 0.10.2, "
        "none with 0.11.2 and 0.12.0.1; 0.11.0 is from the report",
        consequence="memory",
        what="a donated array that is updated, read in a loop and updated again: a "
        "copy of all of it",
        way_round="take what the loop reads out of the array before it, in one gather, "
        "or use jax 0.11.2 or newer",
        in_program=read_in_loops,
    ),
    KnownFault(
        report="jax#39025",
        platforms=("tpu",),
        affected=(_OLD, _OLD),
        looked_at=((0, 10, 1), _OLD),
        how="from the report: libtpu 0.0.42.1 has it, 0.0.41 has not, and the same in "
        "a jitted step is right",
        consequence="wrong values",
        what="the gradient of x[:, ids] taken outside of jax.jit, as a program of one "
        "scatter: rows are zero",
        way_round="take the gradient inside of jax.jit",
        in_program=lone_scatters,
    ),
    KnownFault(
        report="xla#49299",
        platforms=("cuda",),
        affected=(None, None),
        looked_at=_ALL,
        how="compiled for H100, in all three versions",
        consequence="does not compile",
        what="a row of a table in a scan, at an index that jnp.searchsorted finds for "
        "one constant of each iteration",
        way_round="search before the scan, or with method='compare_all'",
        options=_without("dynamic-slice-annotator"),
        in_program=searched_slices,
        error=r"Failed to evaluate instruction \(.*\) since it depends on infeed or "
        r"parameters to its parent computation",
    ),
    KnownFault(
        report="jax#40830",
        platforms=("cpu",),
        affected=(None, None),
        looked_at=_ALL,
        how="from the report, on 0.12.0.dev20260920; it depends on the moment: 0 of 20 "
        "of 2 MiB were wrong here with each of three versions",
        consequence="wrong values",
        what="jax.lax.psum_scatter by gloo, with jax.distributed: wrong at times on "
        "rank 0, in parts of more than 256 KiB",
        way_round="use jax.lax.psum, and take the own part of the sum",
        in_program=scattered_sums,
    ),
    KnownFault(
        report="jax#32242",
        platforms=("cuda",),
        affected=(None, None),
        looked_at=_ALL,
        how="from the report (jax 0.8.0, cuDNN 9.10); no version that was traced here "
        "refuses it",
        consequence="wrong values",
        what="a gradient by cuDNN's attention with a bias in float32: NaN",
        way_round="cast the bias to the dtype of the queries",
        in_program=cudnn.wide_bias,
    ),
    KnownFault(
        report="jax#28974",
        platforms=("cuda",),
        affected=(None, None),
        looked_at=_ALL,
        how="traced: an error in all three versions",
        consequence="does not compile",
        what="a mask of one query for cuDNN's attention, without a bias",
        way_round="broadcast the mask over the queries",
        in_program=cudnn.mask_alone,
        error="Bias must have same seq length as QKV",
    ),
    KnownFault(
        report="jax#30593",
        platforms=("cuda",),
        affected=(None, (0, 8, 0)),
        looked_at=_ALL,
        how="traced: none of the three versions refuses it; 0.7.0 did",
        consequence="does not compile",
        what="a gradient by the bias of cuDNN's attention for more than one example",
        way_round=_CUDNN_GONE,
        in_program=cudnn.batched_bias,
        error="cuDNN only supports bias gradient when the batch size is 1",
    ),
    KnownFault(
        report="jax#27184",
        platforms=("cuda",),
        affected=(None, (0, 5, 0)),
        looked_at=_ALL,
        how="traced: all three versions give the gradient; 0.5.0 did not",
        consequence="no gradient",
        what="a bias of cuDNN's attention gets no gradient",
        way_round=_CUDNN_GONE,
        in_program=cudnn.lost_bias,
    ),
    KnownFault(
        report="jax#38486",
        platforms=("cuda",),
        affected=None,
        looked_at=_ALL,
        how="read: 0.10.2 and 0.11.2 take no function of the scores, and 0.12.0.1 "
        "refuses it before cuDNN 9.13",
        consequence="wrong values",
        what="cuDNN's attention with a function of the scores, before cuDNN 9.13: NaN",
        way_round="use cuDNN 9.13 or newer",
        in_program=cudnn.function_of_scores,
    ),
    KnownFault(
        report="jax#23701",
        platforms=("cuda",),
        affected=(None, (0, 4, 33)),
        looked_at=_ALL,
        how="from the report: it was fixed before any version that jaxmem supports",
        consequence="crash",
        what="cuDNN's attention at heads of 48",
        way_round="pad the heads to 64, as jaxmem.ops.dot_product_attention does",
        in_program=cudnn.crashing_heads,
    ),
)


def of_error(text: str) -> KnownFault | None:
    """The row whose error a text is."""
    return next((f for f in FAULTS if f.error and re.search(f.error, text)), None)
