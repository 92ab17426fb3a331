"""Collectives stand where the sums of the step need them.

Which devices have the same value is followed through the module (`_spread.py`). A sum
over devices adds what each has of one place, and once; what the step says to be the
same everywhere is the same; and devices that join come there together.
"""

import math
from collections.abc import Iterator

from jaxmem.auditing._module import Module
from jaxmem.auditing._report import AuditFinding
from jaxmem.auditing._sharding import Join, differ
from jaxmem.memory.buffers.shapes import arrays_of

_SUMS = ("all-reduce", "reduce-scatter")
# names of operations by which a step itself asks for a sum
_ASKED = ("psum", "reduce_scatter", "shard_map")
_SLICED = "https://github.com/openxla/xla/issues/42481"
_HOISTED = "https://github.com/openxla/xla/issues/49143"
_WAY_ROUND = (
    "compare the step with one on a single device; name the sharding of the value "
    "before and after the sum with jax.lax.with_sharding_constraint, or write the sum "
    "in jax.shard_map"
)
_OF_LOOP = (
    "compile with compiler_options={'xla_disable_hlo_passes': "
    "'while-loop-all-reduce-code-motion'}"
)


def collectives(module: Module) -> Iterator[AuditFinding]:
    """Finds sums over devices at wrong places, and outputs that lack one."""
    if module.hlo.devices < 2:
        return
    for join in module.shardings.joins.values():
        what = _met_apart(join) or _sum_of(module, join)
        if what:
            yield _finding(module, join, what)
    yield from _outputs(module)


def _met_apart(join: Join) -> str:
    if not any(differ(join.control, group) for group in join.groups):
        return ""
    return (
        f"{join.made.name} is reached by a choice that the devices make differently, "
        "and the devices deadlock"
    )


def _sum_of(module: Module, join: Join) -> str:
    kind = join.made.opcode.removesuffix("-start")
    operand = join.operand
    if kind not in _SUMS or operand is None or _is_asked_for(module, join):
        return ""
    groups = [group for group in join.groups if len(group) > 1]
    for axis, where in enumerate(operand.where):
        if where and any(differ(where, group) for group in groups):
            return (
                f"{join.made.name} adds up parts that lie at different places of "
                f"axis {axis} of a larger array"
            )
    if groups and _adds(module, join) and not _is_constant(module, join):
        parts = [part.who for part in operand.parts] or [operand.who]
        if not all(any(differ(who, group) for group in groups) for who in parts):
            return (
                f"{join.made.name} sums a value that is replicated: the sum is "
                f"{len(groups[0])} times what it was"
            )
    return ""


def _is_asked_for(module: Module, join: Join) -> bool:
    """Whether the step's own text has this sum; of combined ones it may have any."""
    name = join.made.metadata.get("op_name", "")
    if len(join.made.operands) > 1:
        return module.has_manual_parts
    return any(asked in name for asked in _ASKED)


def _adds(module: Module, join: Join) -> bool:
    root = module.hlo.roots.get(next(iter(join.made.called), ""), "")
    made = module.hlo.instruction(root)
    return made is not None and made.opcode == "add"


def _is_constant(module: Module, join: Join) -> bool:
    made = module.hlo.instruction(join.made.operands[0])
    while made is not None and made.opcode in ("broadcast", "bitcast", "copy"):
        made = module.hlo.instruction(made.operands[0])
    return made is not None and made.opcode == "constant"


def _outputs(module: Module) -> Iterator[AuditFinding]:
    """Of an output in so many parts no more than so many values are on the devices."""
    whole, shardings = module.step.outputs, module.shardings.outputs
    root = module.hlo.roots.get(module.hlo.entry, "")
    local = arrays_of(module.hlo.shape_of(root))
    if not len(whole) == len(local) == len(shardings):
        return
    for i, (sizes, part, spread) in enumerate(
        zip(whole, local, shardings, strict=True)
    ):
        if spread is None or spread.loose or len(sizes) != len(part.sizes):
            continue
        pairs = zip(sizes, part.sizes, strict=True)
        parts = math.prod(-(-size // max(1, own)) for size, own in pairs)
        if len(set(spread.who)) > parts:
            what = (
                f"output {i} is in {parts} part{'s' if parts > 1 else ''}, and the "
                f"devices have {len(set(spread.who))} values of it: a sum over devices "
                "is missing"
            )
            yield module.finding("collectives", root, what, _WAY_ROUND)


def _finding(module: Module, join: Join, what: str) -> AuditFinding:
    name = join.made.metadata.get("op_name", "")
    report, way_round = "", _WAY_ROUND
    if "different places" in what:
        looped = "/while/" in name
        report = _HOISTED if looped else _SLICED
        way_round = _OF_LOOP if looped else _WAY_ROUND
    return module.finding("collectives", join.made.name, what, way_round, report)
