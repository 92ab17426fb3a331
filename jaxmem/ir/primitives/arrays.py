"""Primitives that pass arrays on, move their elements, make or overwrite arrays."""

from functools import partial

from jaxmem.ir.primitives.record import ALL, FIRST
from jaxmem.ir.primitives.record import PrimitiveKind as Kind
from jaxmem.ir.primitives.record import PrimitiveRecord as Record

_exact = partial(Record, exact=True)
_moves = partial(_exact, moves=True, fused=True, linear=FIRST)
_alike = partial(_moves, elementwise=True, fusible=True, operations=1)

_IDENTITY = (
    _alike("copy", Kind.IDENTITY),
    _alike("copy_p", Kind.IDENTITY),
    _exact("layout_constraint", Kind.IDENTITY, view=True),
    _exact("mesh_cast", Kind.IDENTITY),
    _exact("name", Kind.IDENTITY, view=True, fused=True),
    # no view: what goes in has to be in memory
    _exact("optimization_barrier", Kind.BARRIER),
    # these two change the type among devices, and no bytes
    _moves("pcast", Kind.IDENTITY, view=True),
    _moves("pvary", Kind.IDENTITY, view=True),
    _exact("reshard", Kind.IDENTITY),
    _exact("sharding_constraint", Kind.IDENTITY, view=True),
    _exact(
        "stop_gradient",
        Kind.IDENTITY,
        elementwise=True,
        view=True,
        fused=True,
        operations=1,
    ),
)

_CAST = (
    _exact("bitcast_convert_type", Kind.CAST, fused=True, fusible=True),
    _alike("convert_element_type", Kind.CAST, exact=False),
    Record("from_edtype", Kind.CAST, view=True),
    _exact(
        "reduce_precision",
        Kind.CAST,
        elementwise=True,
        fused=True,
        fusible=True,
        operations=1,
        keeps_zero=True,
    ),
    Record("to_edtype", Kind.CAST, view=True),
)

_SHAPE = (
    _moves("broadcast_in_dim", Kind.SHAPE, fusible=True),
    _moves("reshape", Kind.SHAPE, view=True),
    _moves("squeeze", Kind.SHAPE, view=True),
    _moves("transpose", Kind.SHAPE, fusible=True),
)

_MOVE = (
    _exact("concatenate", Kind.MOVE, fused=True, fusible=True, linear=ALL),
    _exact("dynamic_slice", Kind.MOVE, fusible=True, linear=FIRST),
    _exact("pad", Kind.MOVE, fused=True, fusible=True, linear=FIRST),
    _moves("rev", Kind.MOVE, fusible=True),
    _moves("slice", Kind.MOVE, fusible=True),
    _exact("split", Kind.MOVE, fused=True, fusible=True, linear=FIRST),
    _exact("stack", Kind.MOVE, fused=True, fusible=True, linear=ALL),
    _exact("tile", Kind.MOVE, fused=True, fusible=True, linear=FIRST),
    _exact("unstack", Kind.MOVE, fused=True, fusible=True, linear=FIRST),
    _exact("gather", Kind.GATHER, fusible=True, linear=FIRST),
)

_CREATION = (
    _exact("empty", Kind.CREATION, fused=True),  # nobody writes or reads it
    _exact("empty2", Kind.CREATION, fused=True),
    _exact("iota", Kind.CREATION, fused=True, fusible=True),
)

_writes = partial(Record, kind=Kind.SCATTER, into_first=True)

# The last of those that `scatter` writes to one place stays. What is subtracted from,
# or multiplied, would have to be that of one part alone: parts are not combined.
_UPDATES = (
    # in the array and the block, for the same places
    _writes("dynamic_update_slice", kind=Kind.UPDATE, exact=True, linear=slice(2)),
    _writes("scatter", exact=True),
    # in the array and what is added, for the same places
    _writes("scatter-add", sums=True, combine="add", linear=slice(0, 3, 2)),
    _writes("scatter-max", exact=True, combine="max"),
    _writes("scatter-min", exact=True, combine="min"),
    _writes("scatter-mul", sums=True),
    _writes("scatter-sub", sums=True),
)

_STATE = (_exact("get", Kind.STATE), _exact("swap", Kind.STATE))

RECORDS = (*_IDENTITY, *_CAST, *_SHAPE, *_MOVE, *_CREATION, *_UPDATES, *_STATE)
