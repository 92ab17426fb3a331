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


def is_jit(eqn: JaxprEqn) -> bool:
    """Whether an equation is a call of a jitted function."""
    return of(eqn).kind is Kind.JIT


def is_scan(eqn: JaxprEqn) -> bool:
    """Whether an equation is `jax.lax.scan`."""
    return of(eqn).name == "scan"


def is_while(eqn: JaxprEqn) -> bool:
    """Whether an equation is `jax.lax.while_loop`."""
    return of(eqn).name == "while"


def is_loop(eqn: JaxprEqn) -> bool:
    """Whether an equation is a scan or a while loop."""
    return of(eqn).kind is Kind.LOOP


def is_branch(eqn: JaxprEqn) -> bool:
    """Whether an equation is `jax.lax.cond`, which is `jax.lax.switch` too."""
    return of(eqn).kind is Kind.BRANCH


def is_shard_map(eqn: JaxprEqn) -> bool:
    """Whether an equation is `jax.shard_map`."""
    return of(eqn).kind is Kind.SHARD_MAP


def is_remat(eqn: JaxprEqn) -> bool:
    """Whether an equation is `jax.checkpoint`, which takes an open jaxpr."""
    return of(eqn).kind is Kind.REMAT


def is_barrier(eqn: JaxprEqn) -> bool:
    """Whether an equation is `jax.lax.optimization_barrier`."""
    return of(eqn).kind is Kind.BARRIER


def is_constraint(eqn: JaxprEqn) -> bool:
    """Whether it says how an array is to be sharded, and computes nothing."""
    return of(eqn).name == "sharding_constraint"


def is_print(eqn: JaxprEqn) -> bool:
    """Whether an equation is `jax.debug.print`, or a callback that gives nothing."""
    return of(eqn).kind is Kind.PRINT


def is_transfer(eqn: JaxprEqn) -> bool:
    """Whether an equation is `jax.device_put`."""
    return of(eqn).kind is Kind.TRANSFER


def is_named(eqn: JaxprEqn) -> bool:
    """Whether an equation is `jax.ad_checkpoint.checkpoint_name`."""
    return of(eqn).name == "name"


def is_cast(eqn: JaxprEqn) -> bool:
    """Whether an equation casts each element to another dtype."""
    return of(eqn).name == "convert_element_type"


def is_sum(eqn: JaxprEqn) -> bool:
    """Whether an equation adds two arrays; `add_any` is that of derivatives."""
    return of(eqn).name in ("add", "add_any")


def is_dot(eqn: JaxprEqn) -> bool:
    """Whether an equation is `jax.lax.dot_general`."""
    return of(eqn).name == "dot_general"


def is_convolution(eqn: JaxprEqn) -> bool:
    """Whether an equation is `jax.lax.conv_general_dilated`."""
    return of(eqn).name == "conv_general_dilated"


def is_reduction(eqn: JaxprEqn) -> bool:
    """Whether an equation is a sum, a maximum or the like along axes."""
    return of(eqn).kind is Kind.REDUCTION


def is_product(eqn: JaxprEqn) -> bool:
    """Whether an equation is a product of matrices, ragged or not, or a convolution."""
    return of(eqn).kind is Kind.PRODUCT


def is_reduce_sum(eqn: JaxprEqn) -> bool:
    """Whether an equation is the sum over axes."""
    return of(eqn).name == "reduce_sum"


def is_broadcast(eqn: JaxprEqn) -> bool:
    """Whether an equation spreads an array along more or longer axes."""
    return of(eqn).name == "broadcast_in_dim"


def is_bitcast(eqn: JaxprEqn) -> bool:
    """Whether an equation reads the bits of an array as another type."""
    return of(eqn).name == "bitcast_convert_type"


def is_random_bits(eqn: JaxprEqn) -> bool:
    """Whether an equation draws the bits of a random key."""
    return of(eqn).name == "random_bits"


def is_scatter_add(eqn: JaxprEqn) -> bool:
    """Whether an equation adds rows, or elements, at places in an array."""
    return of(eqn).name == "scatter-add"


def is_dynamic_slice(eqn: JaxprEqn) -> bool:
    """Whether an equation is `jax.lax.dynamic_slice`."""
    return of(eqn).name == "dynamic_slice"


def is_update(eqn: JaxprEqn) -> bool:
    """Whether an equation is `jax.lax.dynamic_update_slice`."""
    return of(eqn).kind is Kind.UPDATE


def is_gather(eqn: JaxprEqn) -> bool:
    """Whether an equation is `jax.lax.gather`."""
    return of(eqn).kind is Kind.GATHER
