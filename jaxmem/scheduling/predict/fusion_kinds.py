"""What becomes of a single equation in XLA: a view, part of a kernel, a call."""

import enum

import numpy as np

from jaxmem import _compat
from jaxmem.ir import jaxprs, primitives
from jaxmem.ir.graph import JaxprGraph
from jaxmem.ir.scans import is_var


class Kind(enum.Enum):
    """What becomes of an equation."""

    VIEW = "the same bytes under another shape"
    TIE = "its outputs are its inputs, after all of them"
    FUSED = "computed where it is read, if that pays"
    ROOT = "ends a kernel: what it reads may be computed in it"
    ALONE = "reads and writes memory: a library call, a loop"


def operations_an_element(eqn) -> float:
    """Operations for each element that a fused equation makes."""
    return primitives.of(eqn).operations


def kind_of(graph: JaxprGraph, eqn) -> Kind:
    """What becomes of an equation of a graph."""
    if primitives.is_barrier(eqn):
        return Kind.TIE
    if _compat.has_side_effects(eqn):
        return Kind.ALONE
    known = primitives.of(eqn)
    if known.view or _is_view(eqn) or _is_layout(graph, eqn):
        return Kind.VIEW
    if known.fusible or _is_outer(eqn):
        return Kind.FUSED
    # what writes into its first operand has the updates computed in its own kernel
    reduces = known.kind is primitives.Kind.REDUCTION
    return Kind.ROOT if reduces or known.into_first else Kind.ALONE


def _is_view(eqn) -> bool:
    """Whether an equation moves nothing: it adds axes of one, or swaps such."""
    name = eqn.primitive.name
    ins = [v.aval for v in eqn.invars]
    outs = [v.aval for v in eqn.outvars]
    if name == "broadcast_in_dim":
        # of a literal there is no array yet that could be looked at otherwise
        return is_var(eqn.invars[0]) and ins[0].size == outs[0].size
    if name == "transpose":
        # axes of one may change places: the elements lie as they did
        kept = [a for a in eqn.params["permutation"] if ins[0].shape[a] != 1]
        return kept == sorted(kept)
    if name == "bitcast_convert_type":
        return ins[0].shape == outs[0].shape
    if name == "convert_element_type":
        return ins[0].dtype == outs[0].dtype
    if jaxprs.keeps_sharding(eqn):
        return True
    return name == "concatenate" and len(ins) == 1


def _is_outer(eqn) -> bool:
    """Whether a matrix product sums nothing, and is a product element by element."""
    if not primitives.is_dot(eqn):
        return False
    (summed, _), _ = eqn.params["dimension_numbers"]
    return all(eqn.invars[0].aval.shape[a] == 1 for a in summed)


def _is_layout(graph: JaxprGraph, eqn) -> bool:
    """Whether a transposition is only how matrix products read or write an array."""
    if eqn.primitive.name != "transpose":
        return False
    (v,), (out,) = eqn.invars, eqn.outvars
    # read so by all: XLA lays the array out as the products ask, and moves nothing
    users = graph.users.get(out, ())
    if users and out not in graph.outputs:
        if all(_dot_reads(graph.eqns[u], out, eqn) for u in users):
            return True
    if v not in graph.maker or len(graph.users[v]) > 1 or v in graph.outputs:
        return False
    return _dot_writes(graph.eqns[graph.maker[v]], eqn)


def _dot_reads(eqn, out, transposition) -> bool:
    """Whether a product reads a transposed array as it lies."""
    # Batch axes outermost; the summed and the free axes each in one piece.
    if not primitives.is_dot(eqn):
        return False
    contracting, batch = eqn.params["dimension_numbers"]
    axes = np.argsort(transposition.params["permutation"])
    return all(
        _in_pieces(
            [
                2 if a in batch[side] else 1 if a in contracting[side] else 0
                for a in axes
                if out.aval.shape[a] != 1
            ]
        )
        for side, v in enumerate(eqn.invars)
        if v is out
    )


def _dot_writes(eqn, transposition) -> bool:
    """Whether a product can write a transposition of its result at once."""
    if not primitives.is_dot(eqn):
        return False
    (contracting, _), (batch, _) = eqn.params["dimension_numbers"]
    out, rows = eqn.outvars[0].aval, eqn.invars[0].aval.ndim - len(contracting)
    kinds = [2] * len(batch) + [1] * (rows - len(batch)) + [0] * (out.ndim - rows)
    axes = [a for a in transposition.params["permutation"] if out.shape[a] != 1]
    of_kind = ([a for a in axes if kinds[a] == kind] for kind in range(3))
    return _in_pieces([kinds[a] for a in axes]) and all(a == sorted(a) for a in of_kind)


def _in_pieces(kinds: list[int]) -> bool:
    """Whether axes of a kind lie together, those of the batch (2) outermost."""
    pieces = [k for i, k in enumerate(kinds) if i == 0 or kinds[i - 1] != k]
    return len(pieces) == len(set(pieces)) and 2 not in pieces[1:]
