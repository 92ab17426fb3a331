"""How an operation treats the layer axis: the axis along which a scan stacks.

An operation that treats it as a batch axis can be done layer by layer. Of the cuts that
`axis_labels` knows, it is the one in as many parts as there are layers: slices keep the
axis, with size one, so most parameters of an operation hold for a slice as they are.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxmem.ir import axis_labels, primitives
from jaxmem.ir.axis_labels import Axis, CutAxes, cut
from jaxmem.ir.label_rules import is_plain_bitcast, is_to_memory
from jaxmem.ir.primitives import Kind
from jaxmem.ir.scans import split


class Batched(NamedTuple):
    """The operation can be done a layer at a time, on operands cut along `ins`."""

    ins: tuple[Axis, ...]
    outs: tuple[int, ...]


class Reduced(NamedTuple):
    """The operation combines the layers by `combine`, a binary operation of `lax`."""

    ins: tuple[Axis, ...]
    combine: str


Treatment = Batched | Reduced | str  # a text says why it is neither

# What has labels for the sake of models. Updates of stacks have none of it, and whether
# a scan with it in its body takes less has not been measured.
OF_MODELS = frozenset(
    """approx_top_k complex conj conv_general_dilated dynamic_slice dynamic_update_slice
    fft gather name random_bits random_fold_in random_seed random_split random_unwrap
    random_wrap stack threefry2x32 tile top_k unstack""".split()
) | primitives.names(lambda p: p.kind in (Kind.SCATTER, Kind.WINDOW, Kind.SPECIAL))


def treatment(eqn, axes: Sequence[Axis]) -> Treatment:
    """What `eqn` does to the layer axis, `axes` saying where its operands have it."""
    # Operands with None are not known to run along the layers; the treatment may ask
    # for them along an axis too.
    if eqn.primitive.name in OF_MODELS:
        return _WORDS[axis_labels.UNKNOWN]
    known = zip(eqn.invars, axes, strict=True)
    layers = max(v.aval.shape[axis] for v, axis in known if axis is not None)
    found = cut(eqn, axes, [None] * len(eqn.outvars), max(layers, 1))
    if isinstance(found, str):
        return _in_words(eqn, axes, found)
    if not _is_of(eqn, found, layers):
        return "it merges the layers"
    if found.combine:
        sums = primitives.of(eqn).kind is not Kind.REDUCTION
        return "it sums over the layers" if sums else Reduced(found.ins, found.combine)
    return Batched(found.ins, tuple(a for a in found.outs if a is not None))


def _is_of(eqn, found: CutAxes, layers: int) -> bool:
    """Whether each part is one layer: no axis is of the layers and of more."""
    atoms = zip([*eqn.invars, *eqn.outvars], [*found.ins, *found.outs], strict=True)
    return all(v.aval.shape[axis] == layers for v, axis in atoms if axis is not None)


_WORDS = {
    axis_labels.UNKNOWN: "it is not known to work layer by layer",
    axis_labels.TWO: "its operands have the layers along different axes",
    axis_labels.SOME: "some of its operands do not run along the layers",
}
_ALONG = {  # what it does along an axis that cannot be cut
    "broadcast_in_dim": "it repeats a single layer",
    "argmax": "it is over the layers",
    "argmin": "it is over the layers",
    "sharding_constraint": "it spreads the layers over devices",
    "reshape": "it merges the layers",
    "squeeze": "it removes the axis of the layers",
    "slice": "it takes some of the layers",
    "pad": "it pads the layers",
    "concatenate": "it joins arrays along the layers",
    "scan": "it loops over another axis",
}


def _in_words(eqn, axes: Sequence[Axis], why: str) -> str:
    """What prevents a cut, said of layers."""
    name = eqn.primitive.name
    if why == axis_labels.WHOLE:
        if name == "scan" and any(a is not None for a in split(eqn, axes)[0]):
            return "it carries something from one layer to the next"
        if len({a for a in axes if a is not None}) == 1:
            return _along(name)
        why = axis_labels.TWO
    if why == axis_labels.TWO and name == "dot_general" and _are_free(eqn, axes):
        return "it multiplies each layer by every other"
    return _WORDS.get(why, why)


def _along(name: str) -> str:
    known = primitives.named(name)
    if known.elementwise:
        return "it repeats a single layer"
    if known.kind is Kind.MATRIX:
        return "it decomposes the layers themselves"
    return _ALONG.get(name, "it is along the layers")


def _are_free(eqn, axes: Sequence[Axis]) -> bool:
    """Whether the axes of a product's operands are of one of them alone."""
    contracted, batch = eqn.params["dimension_numbers"]
    of_both = ((*contracted[side], *batch[side]) for side in (0, 1))
    return all(a not in taken for a, taken in zip(axes, of_both, strict=True))


def _is_repeated(eqn) -> bool:
    """Whether it is done for each layer: it costs next to nothing."""
    known = primitives.of(eqn)
    return (
        known.cheap
        or primitives.is_constraint(eqn)
        or is_plain_bitcast(eqn)
        or is_to_memory(eqn)
    )


def _is_iota(eqn) -> bool:
    return primitives.of(eqn).name == "iota"


def operand_axes(eqn, out_axis: int) -> tuple[Axis, ...] | None:
    """Along which axes the operands must be cut to make a slice of the output."""
    # None for an operation that is not worth repeating.
    if not _is_repeated(eqn) or len(eqn.outvars) != 1:
        return None
    # counted along another axis, every layer has the same numbers
    if _is_iota(eqn) and eqn.params["dimension"] == out_axis:
        return None
    layers = eqn.outvars[0].aval.shape[out_axis]
    found = cut(eqn, [None] * len(eqn.invars), [out_axis], max(layers, 1))
    if isinstance(found, str) or not _is_of(eqn, found, layers):
        return None
    return found.ins


def narrow(eqn, outs: Sequence[Axis], size: int = 1) -> dict[str, Any]:
    """The parameters of `eqn` where its output has `size` layers along `outs[0]`."""
    ins = [None] * len(eqn.invars)  # of operations on layers, none asks for them
    return axis_labels.resized(eqn, ins, outs, lambda layers: size)
