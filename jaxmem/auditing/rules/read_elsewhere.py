"""A fusion that updates an operand in place reads of it only what it writes.

Its threads run in any order: what one of them reads at another place may have been
written by then.
"""

from collections.abc import Iterator

from jaxmem.auditing._module import Module
from jaxmem.auditing._report import AuditFinding
from jaxmem.memory.buffers import Instruction

_SAME = frozenset("bitcast convert copy".split())
_MOVES = frozenset("dynamic-slice slice gather reverse transpose pad".split())
_UPDATES = ("dynamic-update-slice", "scatter")
_REPORT = "https://github.com/openxla/xla/issues/49176"
_WAY_ROUND = (
    "join the rows with jnp.concatenate in place of the update, or compile with "
    "compiler_options={'xla_disable_hlo_passes': 'algsimp'}"
)


def read_elsewhere(module: Module) -> Iterator[AuditFinding]:
    """Finds fusions that read an operand at other places than they update it."""
    for name, (_, rest) in module.hlo.lines.items():
        if " fusion(" not in rest or name not in module.lives.position:
            continue
        made = module.hlo.instruction(name)
        if made is not None:
            yield from _of_fusion(module, made)


def _of_fusion(module: Module, made: Instruction) -> Iterator[AuditFinding]:
    outputs = [module.values[key] for key in module.flow.leaves(made.name)]
    slots = {(module.slot(v), v.size) for v in outputs if v.name == made.name}
    inside = list(module.hlo.body(made.called[0]))
    updates = [one for one in inside if one.opcode in _UPDATES]
    parameters = {one.element: one for one in inside if one.opcode == "parameter"}
    for number, operand in enumerate(made.operands if updates else ()):
        key = module.flow.value(operand)
        value = module.values[key] if key else None
        if value is None or (module.slot(value), value.size) not in slots:
            continue
        same = _copies(inside, parameters[number].name)
        own = next((one for one in updates if one.operands[0] in same), None)
        wrong = own and next(_elsewhere(module, inside, same, own), None)
        if wrong:
            what = (
                f"{made.name} updates {operand} in place, and reads it with "
                f"{wrong.name} at other places"
            )
            at = module.described(wrong.name)
            yield AuditFinding(
                "read_elsewhere", what, made.name, *at, _REPORT, _WAY_ROUND
            )


def _copies(inside: list[Instruction], name: str) -> set[str]:
    """The names that a parameter has in a fusion."""
    found = {name}
    for one in inside:
        if one.opcode in _SAME and one.operands[0] in found:
            found.add(one.name)
    return found


def _elsewhere(
    module: Module, inside: list[Instruction], same: set[str], update: Instruction
) -> Iterator[Instruction]:
    """What reads it, moves it, and is not the slice that is written."""
    for one in inside:
        if one.opcode in _MOVES and one.operands[0] in same:
            if one.opcode != "dynamic-slice" or _index(module, one, 1) != _index(
                module, update, 2
            ):
                yield one


def _index(module: Module, made: Instruction, first: int) -> tuple[str, ...]:
    """The index of a slice: names, and the numbers of constants."""
    return tuple(_number(module, name) for name in made.operands[first:])


def _number(module: Module, name: str) -> str:
    made = module.hlo.instruction(name)
    while made is not None and made.opcode in _SAME:
        name = made.operands[0]
        made = module.hlo.instruction(name)
    is_number = made is not None and made.opcode == "constant"
    return made.argument if made is not None and is_number else name
