"""`muon`: Muon for matrices and AdamW for the rest, as `optax.contrib.muon`."""

from collections.abc import Callable, Sequence
from typing import Any, get_args

import jax
import optax
from jax.sharding import NamedSharding
from jax.tree_util import keystr
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import PyTree

from jaxmem._checks import (
    check_bool,
    check_choice,
    check_dtype,
    check_float,
    check_int,
    shown,
    wrong_type,
    wrong_value,
)
from jaxmem.optim._adama_arguments import check_mask, check_rate
from jaxmem.optim.factored.arguments import decay, decayed, number
from jaxmem.optim.factored.leaves import check_real
from jaxmem.optim.low_bit.adam import adamw
from jaxmem.optim.low_bit.low_bit import LowBit, nearest_code
from jaxmem.optim.orthogonal.matrices import axes_of_leaves, check_axes_of
from jaxmem.optim.orthogonal.newton_schulz import (
    DION,
    STANDARD,
    Coefficients,
    NewtonSchulz,
    Preconditioning,
)
from jaxmem.optim.orthogonal.rule import MuonLeaf, MuonRule, of_matrices

_NUMBERS = "muon_weight_dimension_numbers"
_PRESETS = {"standard": STANDARD, "dion": DION}
_COEFFS = 'three numbers, such three for each step, "standard" or "dion"'
_SHARDINGS = (
    "a tree of jax.sharding.NamedSharding with the structure of the parameters or a "
    "prefix of it, such as jax.tree.map(lambda x: x.sharding, params)"
)


def muon(
    learning_rate: optax.ScalarOrSchedule,
    ns_coeffs: Sequence[Any] | str = "standard",
    ns_steps: int = 5,
    beta: ArrayLike = 0.95,
    eps: ArrayLike = 1e-8,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    weight_decay_mask: PyTree | Callable[[PyTree], PyTree] | None = None,
    mu_dtype: DTypeLike | None = None,
    *,
    nesterov: bool = True,
    adaptive: bool = False,
    preconditioning: Preconditioning = "frobenius",
    adam_b1: ArrayLike = 0.9,
    adam_b2: ArrayLike = 0.999,
    adam_eps_root: ArrayLike = 0.0,
    adam_weight_decay: optax.ScalarOrSchedule = 0.0,
    adam_learning_rate: optax.ScalarOrSchedule | None = None,
    muon_weight_dimension_numbers: Any = None,
    consistent_rms: ArrayLike | None = None,
    stacked: Any = None,
    bits: int | LowBit = 32,
    gram: bool = False,
    shardings: Any = None,
    deal: bool = True,
) -> optax.GradientTransformationExtraArgs:
    r"""Muon, a matrix at a time: `optax.contrib.muon` with less memory and traffic.

    Of a matrix [m, n] with gradient g at step t = 1, 2, ...::

      mu <- beta mu + (1 - beta) g
      x = beta mu / (1 - beta^(t + 1)) + (1 - beta) g / (1 - beta^t)
      x = x / (|x| + eps), and `ns_steps` times x <- (c0 + c1 x x^T + c2 (x x^T)^2) x
      update = sqrt(max(1, n / m)) x

    with x transposed where m > n. All other leaves take AdamW. Arguments, defaults and
    results are those of `optax.contrib.muon`, to rounding. The matrices of a stack
    [layers, m, n] are done one after another, so that the products of one matrix are
    there at a time, and `jaxmem.schedule` moves each into the backward scan. With
    `stacked` those of a layer are found by themselves, where optax asks for dimension
    numbers.

    **State**, bytes a parameter of a matrix: 4 in float32, 2 with `mu_dtype` bfloat16,
    1.06 with `bits=8`, 0.53 with `bits=4`; of others twice that.

    **Error.** With `bits` the momentum is rounded after each step as that of `adam` is;
    the update is made of the momentum before it is rounded. `gram` does the same
    iterations on Gram matrices, whose rounding errors grow by up to 3.4^4 until the
    matrix is computed again, after three steps: with float32 products they stay below
    1e-4 of the update. TPUs and GPUs round operands of float32 products unless
    `jax.default_matmul_precision` says otherwise: there do not use it without that.

    **Sharded matrices.** XLA partitions the iterations product by product, with
    exchanges in each. Given `shardings`, the momentum of a stack is dealt over the
    devices that share its matrices, with one all-to-all, and its updates return with
    one. A matrix that is alone is gathered, and its update needs no message. With
    `gram` its larger side is sharded, and its Gram matrices are summed. Axes of the
    mesh that the leaf is replicated over do the same work.

    Args:
      learning_rate: a scalar, or a schedule of the number of steps.
      ns_coeffs: c0, c1, c2; or a triple for each step, of which the last `ns_steps`
        count; or "standard" or "dion".
      ns_steps: how many iterations.
      beta: decay of the momentum, in [0, 1).
      eps: added to denominators, of Adam too.
      weight_decay: of matrices, multiplied by the learning rate; with it `update` needs
        the parameters.
      weight_decay_mask: where: a tree of bools, or a function of the parameters that
        gives one.
      mu_dtype: of the momentum and of Adam's first moment; None is the parameter's.
      nesterov: False: x = mu / (1 - beta^t).
      adaptive: multiply the update of a matrix by its product with x, elementwise and
        summed. In optax it is that of the whole stack.
      preconditioning: what x is divided by: its Frobenius norm, its "spectral" norm, or
        as in "aol" and "schatten" of optax.
      adam_b1, adam_b2, adam_eps_root, adam_weight_decay: of AdamW for other leaves.
      adam_learning_rate: by default that of the matrices.
      muon_weight_dimension_numbers: `optax.contrib.MuonDimensionNumbers`, or a tree of
        these, and of None for AdamW; a function of the parameters may give it. Axes in
        neither list count matrices. By default leaves of two axes are matrices.
      consistent_rms: update = sqrt(max(m, n)) consistent_rms x.
      stacked: which leaves have layers along axis 0, as `came` takes them, in place of
        dimension numbers: of these [layers, m, n] are matrices, of others [m, n].
      bits: 8, 4 or a `LowBit`: momentum, and Adam's moments, in codes.
      gram: iterate on the Gram matrix of the smaller side; less work where the other
        side is more than 1.5 times as long.
      shardings: a tree of `NamedSharding`s of the parameters, or a prefix.
      deal: False: the matrices of a stack are done one after another on all devices, as
        if each was alone, so that `jaxmem.schedule` can release their gradients.

    Returns:
      An `optax.GradientTransformationExtraArgs`, an `optax.partition` of both rules.

    Raises:
      ValueError, TypeError: an argument out of its range, or two that exclude each
        other; from `init`, a leaf that is no real floating array; from `update` a state
        made with other options or for other parameters.

    Source:
      Jordan et al. (2024), "Muon: An optimizer for hidden layers in neural networks";
      Liu et al., arXiv 2502.16982, for `consistent_rms`. Dealing layers over devices:
      Ahn et al., arXiv 2504.05295, and the distributed Muon of Megatron.

    Example::

      tx = jaxmem.optim.muon(2e-2, stacked="layers")
      step = jaxmem.schedule(step, donate_argnums=0)  # an ordinary step with tx
    """
    how = _codes(bits, mu_dtype)
    rule = MuonRule(
        iterations=NewtonSchulz(
            _coefficients(ns_coeffs, check_int("ns_steps", ns_steps, 1)),
            number("eps", eps, at_least=0),
            check_choice("preconditioning", preconditioning, get_args(Preconditioning)),
            check_bool("gram", gram),
        ),
        beta=decay("beta", beta),
        how=how,
        mu_dtype=None if mu_dtype is None else check_dtype("mu_dtype", mu_dtype),
        nesterov=check_bool("nesterov", nesterov),
        adaptive=check_bool("adaptive", adaptive),
        consistent_rms=None
        if consistent_rms is None
        else number("consistent_rms", consistent_rms, above=0),
        deal=check_bool("deal", deal),
    )
    rate = check_rate("learning_rate", learning_rate)
    slower = rate
    if adam_learning_rate is not None:
        slower = check_rate("adam_learning_rate", adam_learning_rate)
    small = (
        decay("adam_b1", adam_b1),
        decay("adam_b2", adam_b2),
        rule.iterations.eps,
        number("adam_eps_root", adam_eps_root, at_least=0),
    )
    others = _others(slower, small, adam_weight_decay, rule)
    check_mask(weight_decay_mask, "weight_decay_mask")
    names = "weight_decay", "weight_decay_mask"
    tail = [
        decayed(weight_decay, weight_decay_mask, names),
        optax.scale_by_learning_rate(rate),
    ]
    leaves = _Leaves(muon_weight_dimension_numbers, stacked, shardings)

    def built(tree: PyTree) -> Any:
        """The transformation for this tree's split into matrices and others."""
        found, labels = leaves.of(tree)
        matrices = optax.chain(of_matrices(rule, found), *tail)
        return optax.partition({"muon": matrices, "adam": others}, labels)

    return _for_each_tree(built)


def _for_each_tree(built: Callable[[PyTree], Any]) -> Any:
    """The transformation that `built` makes for a tree of parameters or gradients."""

    def init(params: PyTree) -> Any:
        check_real("muon", params)
        return built(params).init(params)

    def update(
        updates: PyTree, state: Any, params: PyTree | None = None, **extra: Any
    ) -> Any:
        if not hasattr(state, "inner_states"):
            made = "the state that muon's init makes, in update(updates, state, params)"
            raise wrong_type("state", state, made)
        # optax's Adam raises a float to the power of its count
        standard = jax.numpy_dtype_promotion("standard")
        with jax.named_scope("jaxmem.muon"), standard:
            return built(updates).update(updates, state, params, **extra)

    return optax.GradientTransformationExtraArgs(init, update)


class _Leaves:
    """Which leaves of a tree are matrices, and how these are sharded."""

    def __init__(self, numbers: Any, stacked: Any, shardings: Any) -> None:
        check_axes_of(numbers, stacked, _NUMBERS)
        for x in jax.tree.leaves(shardings):
            if not isinstance(x, NamedSharding):
                raise wrong_type("shardings", shardings, _SHARDINGS)
        self.numbers, self.stacked, self.shardings = numbers, stacked, shardings

    def of(self, tree: PyTree) -> tuple[dict[str, MuonLeaf], PyTree]:
        """The matrices by path, and a tree of labels."""
        paths = [keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
        axes = axes_of_leaves(tree, self.numbers, self.stacked, "muon", _NUMBERS)
        every = zip(paths, axes, self._spread(tree), strict=True)
        found = {path: MuonLeaf(one, s) for path, one, s in every if one is not None}
        labels = ["muon" if path in found else "adam" for path in paths]
        return found, jax.tree.structure(tree).unflatten(labels)

    def _spread(self, tree: PyTree) -> list[NamedSharding | None]:
        if self.shardings is None:
            return [None] * len(jax.tree.leaves(tree))
        try:
            return jax.tree.leaves(jax.tree.broadcast(self.shardings, tree))
        except ValueError as error:
            raise ValueError(
                f"shardings={shown(self.shardings)}: {_SHARDINGS}; the parameters are "
                f"{shown(tree)}: {error}"
            ) from None


def _codes(bits: Any, mu_dtype: Any) -> LowBit:
    how = nearest_code(bits)
    if how.bits != 32 and mu_dtype is not None:
        raise ValueError(
            f"mu_dtype={shown(mu_dtype)} with bits={how.bits}: codes have a dtype of "
            "their own; give one of both"
        )
    return how


def _coefficients(given: Any, steps: int) -> tuple[Coefficients, ...]:
    """Those of each step."""
    if isinstance(given, str):
        given = _PRESETS[check_choice("ns_coeffs", given, tuple(_PRESETS))]
    try:
        triples = given if all(hasattr(x, "__len__") for x in given) else [given]
        found = tuple(
            tuple(check_float("ns_coeffs", c) for c in triple) for triple in triples
        )
    except TypeError:
        raise wrong_type("ns_coeffs", given, _COEFFS) from None
    if not found or any(len(c) != 3 for c in found):
        raise wrong_value("ns_coeffs", given, _COEFFS)
    if len(found) == 1:
        return found * steps  # pyright: ignore[reportReturnType]
    if len(found) < steps:
        raise ValueError(f"ns_coeffs={shown(given)}: fewer than ns_steps={steps}")
    return found[-steps:]  # pyright: ignore[reportReturnType]


def _others(rate: Any, small: tuple, weight_decay: Any, rule: MuonRule) -> Any:
    """AdamW, with moments as the momentum is kept."""
    b1, b2, eps, eps_root = small
    decay_rate = check_rate("adam_weight_decay", weight_decay)
    if rule.how.bits != 32:
        how = {"bits": rule.how, "nesterov": rule.nesterov}
        return adamw(rate, b1, b2, eps, eps_root, decay_rate, **how)
    adam = optax.scale_by_adam(
        b1, b2, eps, eps_root, rule.mu_dtype, nesterov=rule.nesterov
    )
    names = "adam_weight_decay", "mask"
    last = optax.scale_by_learning_rate(rate)
    return optax.chain(adam, decayed(decay_rate, None, names), last)
