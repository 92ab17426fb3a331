"""Products with weights of few bits: nobody keeps the wide copy of such a weight.

What quantisation libraries write is a cast or a lookup of codes, times scales, and a
product. JAX keeps the wide weight for the gradient of the product's input. Here the
product is made of its arguments in a checkpoint, so that they alone are kept, and of
the input only what a trained scale would need.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxmem import _compat
from jaxmem.ir.fused import fused_only
from jaxmem.ir.primitives import Kind
from jaxmem.rewriting._find import Match, frames_of
from jaxmem.rewriting._flat_graph import FlatGraph, FlatValue, Node, inputs_of, made_of
from jaxmem.rewriting._pattern import Pattern

_NAME = "dequantized_product"


def _product(x, codes, scale):
    return x @ (codes.astype(scale.dtype) * scale)


# by which reports name it; what is found is wider than this one way to write it
PATTERN = Pattern(
    _NAME, _product, jax.checkpoint(_product), examples=("m k", "k n", "1 n")
)


@dataclass(frozen=True, eq=False)
class DequantizedProduct(Match):
    """A product, and the operations by which its weights come from arguments."""

    nodes: tuple[Node, ...] = ()  # in order, the product the last

    @property
    def values(self) -> list[FlatValue]:
        """Codes, scales, and the product's other operand."""
        return inputs_of(self.nodes)

    def run(self, env: dict[FlatValue, Any]):
        """The product, with its weights made in a checkpoint."""

        def product(*args):
            known = {v: v.known for n in self.nodes for v in n.ins if v.is_known}
            inner = known | dict(zip(self.values, args, strict=True))
            for node in self.nodes:
                outs = _compat.bind(node.eqn, [inner[v] for v in node.ins])
                inner.update(zip(node.outs, outs, strict=True))
            return inner[self.root.outs[0]]

        with jax.named_scope(f"jaxmem.{_NAME}"):
            # With its barriers: else XLA keeps the wide weight of layers that are
            # written out.
            return jax.checkpoint(product)(*(env[v] for v in self.values))


def dequantized_products(graph: FlatGraph) -> Iterator[DequantizedProduct]:
    """The products of a graph with an operand that codes of few bits stand for."""
    made = _made_of_codes(graph)
    for root in graph.nodes if made else ():
        if root.record.kind is not Kind.PRODUCT or root in made:
            continue
        wide = [v.node for v in root.ins if v.node is not None and made.get(v.node)]
        if not wide:
            continue
        chain = [node for operand in wide for node in made_of(operand, made)]
        nodes = (*dict.fromkeys(chain), root)
        frame, opened = frames_of(frozenset(nodes))
        if any(f.has_own_rule for f in opened):
            continue
        about = PATTERN, root, (), {}, frozenset(nodes[:-1]), frame, frozenset(opened)
        yield DequantizedProduct(*about, nodes)


def _made_of_codes(graph: FlatGraph) -> dict[Node, bool]:
    """Operations on arguments that cost nothing, and whether codes are among those."""
    codes = {v for v in graph.top.ins if _is_few_bits(v)}
    if not codes:
        return {}
    given, made = set(graph.top.ins), {}
    for node in graph.nodes:
        read = {v for v in node.ins if not v.is_known}
        if not read or not read <= given or fused_only(node.eqn) is None:
            continue
        given.update(node.outs)
        made[node] = not codes.isdisjoint(read)
        codes.update(node.outs if made[node] else ())
    return made


def _is_few_bits(value: FlatValue) -> bool:
    dtype = value.dtype
    if dtype is None or dtype == jnp.bool_ or not value.shape:
        return False
    return getattr(dtype, "itemsize", 8) <= 1
