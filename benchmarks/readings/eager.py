"""The graph that an eager framework has of a step: nothing is fused.

Every equation is an operation and makes arrays that exist in memory, as PyTorch runs a
model and as ROAM, OLLA and others count. What is a view there (a reshape, a transpose,
a broadcast) is one here.
"""

from collections.abc import Mapping
from typing import Any

from jaxmem.ir import jaxprs as _jaxpr
from jaxmem.ir.scans import is_var, size_of
from jaxmem.planning import Graph, Operation, Value

VIEWS = frozenset("broadcast_in_dim expand_dims name reshape squeeze transpose".split())


def every_equation(closed, aliases: Mapping[int, int]) -> Graph:
    """A flat jaxpr as it is written.

    Args:
      closed: a closed jaxpr without calls, as in `Operations.closed`.
      aliases: position of an output -> of the donated input in whose memory it lies.

    Returns:
      Its graph.
    """
    jaxpr = _jaxpr.split(closed)[0]
    numbers: dict[Any, int] = {}
    values: list[Value] = []

    def number(v) -> int:
        if v not in numbers:
            numbers[v] = len(values)
            values.append(Value(size_of(v), str(v.aval)))
        return numbers[v]

    arguments = [number(v) for v in (*jaxpr.constvars, *jaxpr.invars)]
    operations = []
    for eqn in jaxpr.eqns:
        read = [numbers[v] for v in eqn.invars if is_var(v) and v in numbers]
        if eqn.primitive.name in VIEWS:
            if read:  # else a number written out: made where it is read
                numbers[eqn.outvars[0]] = read[0]
            continue
        made = tuple(number(v) for v in eqn.outvars)
        operations.append(Operation(eqn.primitive.name, tuple(read), made))
    inputs, outs = jaxpr.invars, jaxpr.outvars
    there = set(arguments)
    new = {
        numbers[outs[o]]: numbers[inputs[i]]
        for o, i in aliases.items()
        if is_var(outs[o]) and numbers.get(outs[o], -1) not in {-1, *there}
    }
    results = dict.fromkeys(numbers[v] for v in outs if is_var(v) and v in numbers)
    return Graph(
        tuple(operations), tuple(values), tuple(arguments), tuple(results), new
    )
