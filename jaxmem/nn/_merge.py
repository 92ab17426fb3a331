"""A norm's scale and bias folded into the dense layers after it, once, and back.

The merged model is the same function with the same tree: the norm's scale is ones, its
bias zeros. That is the state the paper's MS norms start from.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax.numpy as jnp
from flax import nnx

from jaxmem import ops
from jaxmem._checks import check_names, check_text, shown, wrong_type, wrong_value

Model = TypeVar("Model")


def merge_norm(model: Model, norm: str, into: str | Sequence[str]) -> Model:
    """`model` with the scale and bias of a norm folded into the layers that read it.

    Args:
        model: a tree of linen parameters (nested dicts), or an nnx module. It is left
            as it is.
        norm: the path of the norm, its names joined by "/" ("layer_0/norm").
        into: the paths of all dense layers that read its output, and of nothing else:
            layers that are left out would see another input.

    Returns:
        A tree, or a module, of the same structure that computes the same function.

    Raises:
        KeyError: a path that is not there.
        ValueError: a norm with a bias and a layer without one, or shapes that do not
            fit.

    Source:
        Yang et al. 2024, arXiv 2406.16282, section 4.3.
    """

    into = check_names("into", into)

    def merged(tree):
        scale, shift = _read_norm(tree, norm)
        for path in into:
            layer = _at(tree, path, "into")
            if shift is not None and layer.get("bias") is None:
                raise ValueError(f"merge_norm: {path} has no bias for that of {norm}")
            _fold(layer, ops.merge_scale, scale, shift)
        _write_norm(tree, norm, scale, shift, jnp.ones_like, jnp.zeros_like)

    return _changed(model, merged)


def unmerge_norm(
    model: Model, norm: str, into: str | Sequence[str], scale: Any, bias: Any = None
) -> Model:
    """The inverse of `merge_norm`: `scale` and `bias` are back in the norm.

    Args:
        model: what `merge_norm` gave, perhaps trained since.
        norm: the path of the norm.
        into: the paths of all layers that read its output.
        scale: what the norm's scale was; None where it has none.
        bias: what the norm's bias was; None where it has none.

    Returns:
        A tree, or a module, of the same structure that computes the same function.

    Raises:
        KeyError: a path that is not there.
        ValueError: a scale with zeros, a layer without a bias, shapes that do not fit.

    Source:
        Yang et al. 2024, arXiv 2406.16282, section 4.3.
    """

    into = check_names("into", into)

    def unmerged(tree):
        now = _read_norm(tree, norm)
        for path in into:
            layer = _at(tree, path, "into")
            _check_against(layer["kernel"], scale=scale, bias=bias)
            if bias is not None and layer.get("bias") is None:
                raise ValueError(
                    f"bias={shown(bias)}: {path} has no bias that this one's share "
                    "could be taken from"
                )
            # What the norm has learned since goes into the layer first.
            _fold(layer, ops.merge_scale, *now)
            _fold(layer, ops.unmerge_scale, scale, bias)
        _write_norm(tree, norm, scale, bias, jnp.asarray, jnp.asarray)

    return _changed(model, unmerged)


def _check_against(kernel: Any, **vectors: Any) -> None:
    """Errors for what is no vector of the kernel's inputs."""
    wanted = kernel.shape[:1]
    for name, value in vectors.items():
        if value is not None and getattr(value, "shape", None) != wanted:
            raise wrong_value(name, value, f"an array of shape {wanted}, or None")


def _changed(model: Any, change: Callable) -> Any:
    if not (isinstance(model, nnx.Module) or hasattr(model, "items")):
        raise wrong_type("model", model, "a tree of parameters, or an nnx.Module")
    if not isinstance(model, nnx.Module):
        tree = _copied(model)
        change(tree)
        return tree
    new = nnx.clone(model)
    state = nnx.state(new, nnx.Param)
    tree = nnx.to_pure_dict(state)
    change(tree)
    nnx.replace_by_pure_dict(state, tree)
    nnx.update(new, state)
    return new


def _copied(tree: Any) -> Any:
    if hasattr(tree, "items"):
        return {k: _copied(v) for k, v in tree.items()}
    return tree


def _at(tree: Any, path: str, argument: str) -> dict[str, Any]:
    check_text(argument, path, "the path of a layer")
    for name in path.split("/"):
        key = name if name in tree else _index(name)
        if key not in tree:
            raise KeyError(
                f"{argument}={path!r}: no {name!r} among {sorted(map(str, tree))}"
            )
        tree = tree[key]
    return tree


def _index(name: str) -> Any:
    # The children of lists in an nnx module go by number.
    return int(name) if name.isdigit() else name


def _read_norm(tree: Any, path: str) -> tuple[Any, Any]:
    layer = _at(tree, path, "norm")
    return layer.get("scale"), layer.get("bias")


def _write_norm(tree, path: str, scale, bias, of_scale, of_bias) -> None:
    layer = _at(tree, path, "norm")
    for name, value, make in (("scale", scale, of_scale), ("bias", bias, of_bias)):
        if value is not None:
            layer[name] = make(value)


def _fold(layer: dict[str, Any], fold: Callable, scale, shift) -> None:
    kernel, bias = fold(layer["kernel"], layer.get("bias"), scale, shift)
    layer["kernel"] = kernel
    if bias is not None:
        layer["bias"] = bias
