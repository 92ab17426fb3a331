"""The arguments of AdamA: hyperparameters at construction, the others at each call."""

from collections.abc import Callable
from typing import Any, get_args

import jax
import jax.numpy as jnp
from jax.tree_util import keystr

from jaxmem._checks import check_bool, check_choice, check_count, check_scalar, shown
from jaxmem._paths import check_bools
from jaxmem.optim._adama_rule import AdamARule, AdamAState, Mode, VScale
from jaxmem.optim.accumulation.transformation import is_one


def _is_gap(x: Any) -> bool:
    return x is None


def check_state(
    state: Any,
    tree: Any = None,
    name: str = "updates",
    is_leaf: Callable[[Any], bool] = _is_gap,
) -> None:
    """TypeError for what is no AdamAState; ValueError for one of other parameters."""
    if not isinstance(state, AdamAState):
        raise TypeError(
            f"state={shown(state)}: AdamA's state, of its init, in "
            "update(updates, state, params)"
        )
    given, wanted = (jax.tree.structure(t, is_leaf=is_leaf) for t in (tree, state.mu))
    if tree is not None and given != wanted:
        raise ValueError(
            f"{name}={shown(tree)}: not of the structure of the parameters that the "
            f"state was made for, {shown(state.mu)}"
        )


def check_moment_shapes(updates: Any, state: AdamAState, is_leaf) -> None:
    """ValueError for moments that are not as their gradients."""
    gradients = jax.tree.leaves_with_path(updates, is_leaf=is_leaf)
    for name, tree in (("mu", state.mu), ("nu", state.nu)):
        moments = jax.tree.leaves(tree, is_leaf=is_leaf)
        for (path, g), x in zip(gradients, moments, strict=True):
            if g is not None and getattr(x, "shape", None) != jnp.shape(g):
                raise ValueError(
                    f"state.{name}{keystr(path)}={shown(x)}: the gradient there is "
                    f"{shown(g)}; the state is one of other parameters or other bits"
                )


def check_rate(name: str, value: Any) -> Any:
    return value if callable(value) else check_scalar(name, value)


def check_mask(mask: Any, name: str = "mask") -> None:
    if mask is not None and not callable(mask):
        allowed = (
            "a tree of bools, a function of the parameters that gives one, or None"
        )
        check_bools(f"{name}={shown(mask)}", mask, allowed)


def check_decays(b1: Any, b2: Any, eps: Any, eps_root: Any) -> tuple[Any, ...]:
    """The same, as Python's numbers or jax's arrays."""
    decays = (
        check_scalar(n, x, at_least=0, below=1) for n, x in (("b1", b1), ("b2", b2))
    )
    small = (("eps", eps), ("eps_root", eps_root))
    return *decays, *(check_scalar(n, x, at_least=0) for n, x in small)


def check_rule(rule: AdamARule, micro_batches) -> None:
    """ValueError for hyperparameters that exclude each other."""
    check_choice("mode", rule.mode, get_args(Mode))
    check_choice("v_scale", rule.v_scale, get_args(VScale))
    check_bool("nesterov", rule.nesterov)
    if rule.mode != "paper" and rule.v_scale != "paper":
        raise ValueError(
            f"v_scale={rule.v_scale!r} with mode={rule.mode!r}: v_scale is how "
            'mode="paper" weighs squares; the other modes have no such factor'
        )
    if rule.axis_name and (rule.mode != "paper" or rule.nesterov):
        raise ValueError(
            f"axis_name with mode={rule.mode!r}, nesterov={rule.nesterov}: only for "
            'mode="paper" without nesterov can the moments of several devices be '
            "combined; reduce the gradients instead (jax.lax.pmean) and leave "
            "axis_name out"
        )
    _check_nesterov(rule, check_count("micro_batches", micro_batches))


def _check_nesterov(rule: AdamARule, n) -> None:
    if rule.nesterov and not is_one(n):
        raise ValueError(
            f"nesterov=True with micro_batches={n}: Nesterov momentum needs the "
            "gradient of the whole mini-batch, which AdamA does not keep; only "
            "micro_batches=1, a Python int (under optax.inject_hyperparams: "
            'static_args=("micro_batches",))'
        )


def check_call(
    rule: AdamARule, is_leaf, updates, state, phase, n, weight, keep
) -> None:
    """Errors for a state that is not AdamA's, and for calls that `rule` excludes.

    `is_leaf` says where trees of moments and gradients end.
    """
    names = {"apply": "params", "accumulate": "grads", None: "updates"}
    check_state(state, updates, names[phase], is_leaf)
    _check_nesterov(rule, n)
    if rule.nesterov and (phase or weight is not None or keep is not None):
        raise ValueError(
            "nesterov=True with phase, weight or keep: Nesterov momentum needs the "
            "gradient when it is applied; call update(grads, state, params)"
        )
