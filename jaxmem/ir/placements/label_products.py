"""Labels of axes: of products, decompositions, windows, and rows read by index."""

from collections.abc import Sequence
from typing import Any

from jaxmem.ir import primitives
from jaxmem.ir.placements.labels import Label, Labels, axes_of, no_labels
from jaxmem.ir.types import JaxprEqn


def dot_general(eqn: JaxprEqn, n: int) -> Labels:
    (contracted, batch) = eqn.params["dimension_numbers"]
    sides = [[(side, d) for d in axes_of(v)] for side, v in enumerate(eqn.invars)]
    shared = zip((*contracted[0], *batch[0]), (*contracted[1], *batch[1]), strict=True)
    for k, (left, right) in enumerate(shared):
        sides[0][left] = sides[1][right] = (2, k)

    def free(side: int) -> list[Label]:
        taken = {*contracted[side], *batch[side]}
        return [name for d, name in enumerate(sides[side]) if d not in taken]

    outs = [*(sides[0][d] for d in batch[0]), *free(0), *free(1)]
    return Labels((tuple(sides[0]), tuple(sides[1])), (tuple(outs),), "add")


GROUPS = "feature_group_count", "batch_group_count"  # of a convolution


def convolution(eqn: JaxprEqn, n: int) -> Labels:
    """Images and features are cut; places of an image overlap and are not."""
    spec = eqn.params["dimension_numbers"]
    image, feature = spec.lhs_spec[:2]
    makes, takes = spec.rhs_spec[:2]
    image_out, feature_out = spec.out_spec[:2]
    of_features, of_images = (eqn.params[name] for name in GROUPS)
    left, right, out = ([*no_labels(v)] for v in (*eqn.invars, *eqn.outvars))
    if of_images == 1:
        left[image] = out[image_out] = "image"
    if of_features == 1:
        left[feature] = right[takes] = "sum"
    groups = of_features * of_images  # one of them is 1
    if groups == 1 or groups % n == 0:  # else a part would have half a group
        right[makes] = out[feature_out] = "feature"
    if groups > 1 and groups % n == 0:
        side = feature if of_features > 1 else image
        left[side] = "feature"
    return Labels((tuple(left), tuple(right)), (tuple(out),), "add")


def gather(eqn: JaxprEqn, n: int) -> Labels:
    d = eqn.params["dimension_numbers"]
    batching = d.operand_batching_dims, d.start_indices_batching_dims
    table, index, rows = _indexed(
        eqn.invars[0].aval.shape,
        eqn.invars[1].aval.shape,
        eqn.outvars[0].aval.shape,
        (d.offset_dims, d.collapsed_slice_dims, d.start_index_map, *batching),
    )
    return Labels((table, index), (rows,))


def scatter(eqn: JaxprEqn, n: int) -> Labels:
    d, combine = eqn.params["dimension_numbers"], primitives.of(eqn).combine
    batching = d.operand_batching_dims, d.scatter_indices_batching_dims
    named = d.update_window_dims, d.inserted_window_dims
    table, index, rows = _indexed(
        eqn.invars[0].aval.shape,
        eqn.invars[1].aval.shape,
        eqn.invars[2].aval.shape,
        (*named, d.scatter_dims_to_operand_dims, *batching),
    )
    if not combine:
        index, rows = (
            tuple(k if k in table else None for k in labels) for labels in (index, rows)
        )
    return Labels((table, index, rows), (table,), combine)


def _indexed(
    table: Sequence[int], index: Sequence[int], rows: Sequence[int], names: Any
) -> Any:
    """Labels of a table, of indices, and of the rows that are read or written there."""
    inside, gone, start, batching, shared = names
    of_index: list[Label] = [*(("index", k) for k in range(len(index) - 1)), None]
    of_table: list[Label] = [None] * len(table)
    of_rows: list[Label] = [None] * len(rows)
    outside = (k for k in range(len(rows)) if k not in inside)
    for k, place in enumerate(outside):
        of_rows[place] = of_index[k]
    for a, b in zip(batching, shared, strict=True):
        of_table[a] = of_index[b]
    kept = (k for k in range(len(table)) if k not in (*gone, *batching))
    for k, place in zip(kept, inside, strict=True):
        if rows[place] == table[k] and k not in start:
            of_table[k] = of_rows[place] = ("window", k)
    return tuple(of_table), tuple(of_index), tuple(of_rows)


def windows(eqn: JaxprEqn, n: int) -> Labels:
    """Pooling: axes along which a window is one element, in its place."""
    p = eqn.params
    rank = len(p["window_dimensions"])
    stretched = p.get("base_dilation", (1,) * rank)

    def is_free(d: int) -> bool:
        steps = p["window_dimensions"][d], p["window_strides"][d], stretched[d]
        return steps == (1, 1, 1) and tuple(p["padding"][d]) == (0, 0)

    free = tuple(d if is_free(d) else None for d in range(rank))
    return Labels((free,) * len(eqn.invars), (free,) * len(eqn.outvars))


def fourier(eqn: JaxprEqn, n: int) -> Labels:
    """The last axes are transformed."""
    batch = eqn.invars[0].aval.ndim - len(eqn.params["fft_lengths"])
    labels = lambda v: tuple(d if d < batch else None for d in axes_of(v))
    return Labels((labels(eqn.invars[0]),), (labels(eqn.outvars[0]),))


def matrices(eqn: JaxprEqn, n: int) -> Labels:
    """Decompositions, solves: the last axes are those of the matrices."""
    batch = eqn.invars[0].aval.ndim - 2
    labels = lambda v: tuple(d if d < batch else None for d in axes_of(v))
    return Labels(tuple(map(labels, eqn.invars)), tuple(map(labels, eqn.outvars)))
