"""One record for each primitive, and the questions about it that are asked most.

A primitive that is not in the table has a record of `Kind.CUSTOM`, of no facts.
"""

from collections.abc import Callable

from jaxmem.ir.primitives import arrays, control, elementwise, sums
from jaxmem.ir.primitives.record import PrimitiveKind as Kind
from jaxmem.ir.primitives.record import PrimitiveRecord as Record
from jaxmem.ir.types import JaxprEqn


class _Table(dict[str, Record]):
    def __missing__(self, name: str) -> Record:
        # kept: records are told apart by identity
        self[name] = record = Record(name, Kind.CUSTOM)
        return record


_TABLE = _Table(
    (record.name, record)
    for module in (arrays, control, elementwise, sums)
    for record in module.RECORDS
)
KNOWN = tuple(_TABLE.values())


def of(eqn: JaxprEqn) -> Record:
    """The record of an equation's primitive."""
    return _TABLE[eqn.primitive.name]


def quoted(eqn: JaxprEqn) -> str:
    """The name of an equation's primitive, as a sentence for users has it."""
    return f"`{of(eqn).name}`"


def named(name: str) -> Record:
    """The record of the primitive of this name."""
    return _TABLE[name]


def names(has: Callable[[Record], bool]) -> frozenset[str]:
    """The names of the primitives in the table whose records are so."""
    return frozenset(record.name for record in KNOWN if has(record))


Question = Callable[[JaxprEqn], bool]


def _of(kind: Kind) -> Question:
    return lambda eqn: of(eqn).kind is kind


def _called(*names: str) -> Question:
    return lambda eqn: of(eqn).name in names


# Whether an equation is, or does, this:
is_jit = _of(Kind.JIT)  # a call of a jitted function
is_loop = _of(Kind.LOOP)  # a scan or a while loop
is_branch = _of(Kind.BRANCH)  # `jax.lax.cond`, which is `jax.lax.switch` too
is_shard_map = _of(Kind.SHARD_MAP)  # `jax.shard_map`
is_remat = _of(Kind.REMAT)  # `jax.checkpoint`, which takes an open jaxpr
is_barrier = _of(Kind.BARRIER)  # `jax.lax.optimization_barrier`
is_print = _of(Kind.PRINT)  # `jax.debug.print`, or a callback that gives nothing
is_transfer = _of(Kind.TRANSFER)  # `jax.device_put`
is_reduction = _of(Kind.REDUCTION)  # a sum, a maximum or the like along axes
is_product = _of(Kind.PRODUCT)  # a product of matrices, ragged or not, or a convolution
is_update = _of(Kind.UPDATE)  # `jax.lax.dynamic_update_slice`
is_gather = _of(Kind.GATHER)  # `jax.lax.gather`

is_scan = _called("scan")  # `jax.lax.scan`
is_while = _called("while")  # `jax.lax.while_loop`
# says how an array is to be sharded, and computes nothing
is_constraint = _called("sharding_constraint")
# says how an array is sharded, on axes that are part of its type
is_reshard = _called("reshard", "mesh_cast")
is_named = _called("name")  # `jax.ad_checkpoint.checkpoint_name`
is_cast = _called("convert_element_type")  # casts each element to another dtype
is_sum = _called("add", "add_any")  # adds two arrays; `add_any` is that of derivatives
is_dot = _called("dot_general")  # `jax.lax.dot_general`
is_convolution = _called("conv_general_dilated")  # `jax.lax.conv_general_dilated`
is_reduce_sum = _called("reduce_sum")  # the sum over axes
is_broadcast = _called("broadcast_in_dim")  # spreads an array along more or longer axes
# reads the bits of an array as another type
is_bitcast = _called("bitcast_convert_type")
is_random_bits = _called("random_bits")  # draws the bits of a random key
is_scatter_set = _called("scatter")  # writes rows, or elements, in an array
is_scatter_add = _called("scatter-add")  # adds rows, or elements, at places in an array
is_dynamic_slice = _called("dynamic_slice")  # `jax.lax.dynamic_slice`
