"""How an operation treats the layer axis: the axis along which a scan stacks.

An operation that treats it as a batch axis can be done layer by layer. Of the cuts that
`rules` knows, it is the one in as many parts as there are layers: slices keep the
axis, with size one, so most parameters of an operation hold for a slice as they are.

So is a `cond` where one predicate holds for all layers, and all that the branches do
treats the layer axis as a batch axis: the `cond` of a stack is that of each layer.
"""

from collections.abc import Sequence

from jaxmem import _compat
from jaxmem.ir import primitives
from jaxmem.ir.graph import JaxprGraph
from jaxmem.ir.placements import REPLICATE, Placement, Placements, Shard, axes_of, rules
from jaxmem.ir.placements.bodies import NotInParts, are_whole, of_branches
from jaxmem.ir.placements.labels import is_plain_bitcast, is_to_memory
from jaxmem.ir.primitives import Kind
from jaxmem.ir.scans import split
from jaxmem.ir.types import JaxprEqn, Var

# What has labels for the sake of models. Updates of stacks have none of it, and whether
# a scan with it in its body takes less has not been measured.
OF_MODELS = frozenset(
    """approx_top_k complex conj conv_general_dilated dynamic_slice dynamic_update_slice
    fft gather name random_bits random_fold_in random_seed random_split random_unwrap
    random_wrap stack threefry2x32 tile top_k unstack""".split()
) | primitives.names(lambda p: p.kind in (Kind.SCATTER, Kind.WINDOW, Kind.SPECIAL))


def placements_of(eqn: JaxprEqn, ins: Sequence[Placement]) -> Placements | str:
    """What `eqn` does to the layer axis, `ins` saying where its operands have it.

    It can be done a layer at a time; or it combines the layers, and gives a term of
    the result for each. A text says why it is neither.
    """
    # Whole operands are not known to run along the layers; the operation may ask for
    # them along an axis too.
    if primitives.is_branch(eqn):
        return _cond(eqn, ins)
    if eqn.primitive.name in OF_MODELS:
        return _WORDS[rules.UNKNOWN]
    axes = axes_of(ins)
    known = zip(eqn.invars, axes, strict=True)
    layers = max(v.aval.shape[axis] for v, axis in known if axis is not None)
    outs = [REPLICATE] * len(eqn.outvars)
    found = rules.place(eqn, ins, outs, max(layers, 1), single=True)
    if isinstance(found, str):
        return _in_words(eqn, axes, found)
    if found.op and not primitives.is_reduction(eqn):
        return "it sums over the layers"
    return found


def _cond(eqn: JaxprEqn, ins: Sequence[Placement]) -> Placements | str:
    if ins[0] != REPLICATE:
        return "which branch it takes depends on the layer"
    if _compat.has_side_effects(eqn):
        return "it has side effects"
    try:
        found = of_branches(eqn, ins, [REPLICATE] * len(eqn.outvars), _in_branch)
    except NotInParts as reason:
        if reason.eqn is eqn:
            return reason.why
        return f"in a branch, {primitives.quoted(reason.eqn)}: {reason.why}"
    if REPLICATE in found.outs:
        return "an output of it does not run along the layers"
    return found


def _in_branch(
    eqn: JaxprEqn, ins: Sequence[Placement], wanted: Sequence[Placement]
) -> Placements | None:
    """How an operation of a branch works layer by layer; None if nobody asks."""
    if are_whole([*ins, *wanted]):
        return None
    if are_whole(ins):
        asked = next(axis for axis in axes_of(wanted) if axis is not None)
        found = of_slice(eqn, asked) or "its output is not of layers"
    else:
        found = placements_of(eqn, ins)
    if isinstance(found, Placements) and found.op:
        found = "it combines the layers"
    if isinstance(found, str):
        raise NotInParts(eqn, found)
    return found


_WORDS = {
    rules.UNKNOWN: "it is not known to work layer by layer",
    rules.TWO: "its operands have the layers along different axes",
    rules.SOME: "some of its operands do not run along the layers",
    rules.MERGED: "it merges the layers",
}
_ALONG = {  # what it does along an axis that cannot be cut
    "broadcast_in_dim": "it repeats a single layer",
    "argmax": "it is over the layers",
    "argmin": "it is over the layers",
    "sharding_constraint": "it shards the layers over devices",
    "reshape": "it merges the layers",
    "squeeze": "it removes the axis of the layers",
    "slice": "it takes some of the layers",
    "pad": "it pads the layers",
    "concatenate": "it joins arrays along the layers",
    "scan": "it loops over another axis",
}


def _in_words(eqn: JaxprEqn, axes: Sequence[int | None], why: str) -> str:
    """What prevents a cut, said of layers."""
    name = eqn.primitive.name
    if why == rules.WHOLE:
        if name == "scan" and any(a is not None for a in split(eqn, axes)[0]):
            return "it carries something from one layer to the next"
        if len({a for a in axes if a is not None}) == 1:
            return _along(name)
        why = rules.TWO
    if why == rules.TWO and name == "dot_general" and _are_free(eqn, axes):
        return "it multiplies each layer by every other"
    return _WORDS.get(why, why)


def _along(name: str) -> str:
    known = primitives.named(name)
    if known.elementwise:
        return "it repeats a single layer"
    if known.kind is Kind.MATRIX:
        return "it decomposes the layers themselves"
    return _ALONG.get(name, "it is along the layers")


def _are_free(eqn: JaxprEqn, axes: Sequence[int | None]) -> bool:
    """Whether the axes of a product's operands are of one of them alone."""
    contracted, batch = eqn.params["dimension_numbers"]
    of_both = ((*contracted[side], *batch[side]) for side in (0, 1))
    return all(a not in taken for a, taken in zip(axes, of_both, strict=True))


def _is_repeated(eqn: JaxprEqn) -> bool:
    """Whether it is done for each layer: it costs next to nothing."""
    known = primitives.of(eqn)
    return (
        known.cheap
        or primitives.is_constraint(eqn)
        or is_plain_bitcast(eqn)
        or is_to_memory(eqn)
    )


def of_slice(eqn: JaxprEqn, out_axis: int) -> Placements | None:
    """How the operands must be cut to make a slice of the output."""
    # None for an operation that is not worth repeating.
    if not _is_repeated(eqn) or len(eqn.outvars) != 1:
        return None
    # counted along another axis, every layer has the same numbers
    if primitives.of(eqn).name == "iota" and eqn.params["dimension"] == out_axis:
        return None
    layers = max(eqn.outvars[0].aval.shape[out_axis], 1)
    ins = [REPLICATE] * len(eqn.invars)
    found = rules.place(eqn, ins, [Shard(out_axis)], layers, single=True)
    return None if isinstance(found, str) else found


def made_of(graph: JaxprGraph, v: Var, axis: int) -> Placements | None:
    """How a slice of `v` is made; None if its slices are read instead."""
    return of_slice(graph.eqns[graph.maker[v]], axis) if v in graph.maker else None
