"""What the neighbourhood of a node looks like, as one number.

The layers of a network look alike: a formula that is not at one place is not at the
places that look the same.
"""

from jaxmem.rewriting._flat_graph import FlatGraph, FlatValue, Node
from jaxmem.rewriting._fold import folded

# Deeper than the deepest formula (a dropout inside attention, with its casts).
DEPTH = 32
# Larger integers are what random keys are folded with: another one in each layer.
_SEED = 2.0**20
_TELLING = (
    *("axes", "broadcast_dimensions", "dimension", "dimension_numbers", "new_sizes"),
    *("permutation", "precision", "shape", "y"),
)


def signatures(graph: FlatGraph) -> dict[Node, int]:
    """The signature of every node, from the `DEPTH` operations above it."""
    nodes = graph.nodes
    number = {node: i for i, node in enumerate(nodes)}
    leaves: list[int] = []
    ins = [[_source(v, number, leaves) for v in node.ins] for node in nodes]
    own = [_own(node) for node in nodes]
    now = own
    for _ in range(DEPTH):
        now = [
            hash((mine, *[now[i] if i >= 0 else leaves[~i] for i in above]))
            for mine, above in zip(own, ins, strict=True)
        ]
    return dict(zip(nodes, now, strict=True))


def _source(value: FlatValue, number: dict[Node, int], leaves: list[int]) -> int:
    """The index of the node that makes a value, or ~index among the leaves."""
    if value.node is not None and folded(value) is None:
        return number[value.node]
    number_there = folded(value)
    if number_there is not None and abs(number_there.value) > _SEED:
        number_there = None
    leaves.append(hash((value.shape, str(value.dtype), number_there)))
    return ~(len(leaves) - 1)


def _own(node: Node) -> int:
    params = tuple(str(node.params[k]) for k in _TELLING if k in node.params)
    shapes = tuple((v.shape, str(v.dtype)) for v in node.outs)
    return hash((node.name, params, shapes, tuple(map(folded, node.outs))))
