"""Rules for tables, by name."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import PyTree

from jaxmem._checks import check_dtype, check_scalar, shown
from jaxmem.ir.unique_rows import broadcast_rows
from jaxmem.optim._adama_arguments import check_rate
from jaxmem.optim._by_keys import held_by_keys
from jaxmem.optim._state_class import check_class
from jaxmem.optim.rows.gradients import is_rows
from jaxmem.optim.rows.rowwise import rowwise


def lazy_adam(
    learning_rate: optax.ScalarOrSchedule,
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.999,
    eps: ArrayLike = 1e-8,
    eps_root: ArrayLike = 0.0,
    mu_dtype: DTypeLike | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Adam on the touched rows of tables, which is not Adam.

    For the rows t that the gradient names, with n the number of steps:

        m_t <- b1 m_t + (1 - b1) g_t,    v_t <- b2 v_t + (1 - b2) g_t^2
        p_t <- p_t - lr m_t / (1 - b1^n) / (sqrt(v_t / (1 - b2^n) + eps_root) + eps)

    Adam would let the moments of all other rows decay, and move those rows by what is
    left in m. Here they wait as they are: a row that comes rarely has a longer memory,
    counted in its own steps. Other parameters have Adam. It is
    `rowwise(optax.adam(...))`, by its own name since it is another rule.

    State, in bytes a parameter: 8, or 6 with `mu_dtype` bfloat16 (float32 parameters).

    Args:
      learning_rate: a scalar, or a schedule of the number of steps.
      b1, b2, eps, eps_root, mu_dtype: as for `optax.adam`.

    Returns:
      An `optax.GradientTransformationExtraArgs`, to be called with the `RowGradients`
      of `value_and_row_grad`.

    Raises:
      TypeError, ValueError: a learning rate that is none; else as `rowwise`.

    Source:
      LazyAdam of TensorFlow Addons; Kingma and Ba (2015), arXiv 1412.6980.

    Example::

      tx = jaxmem.optim.lazy_adam(1e-3)
    """
    rate = check_rate("learning_rate", learning_rate)
    limits = {"b1": b1, "b2": b2}
    for name, value in limits.items():
        check_scalar(name, value, at_least=0, below=1)
    for name, value in {"eps": eps, "eps_root": eps_root}.items():
        check_scalar(name, value, at_least=0)
    if mu_dtype is not None:
        check_dtype("mu_dtype", mu_dtype)
    return rowwise(optax.adam(rate, b1, b2, eps, eps_root, mu_dtype))


class RowwiseAdagradState(NamedTuple):
    """Sums of mean squares.

    Attributes:
      sums: a tree as the parameters, float32; of a leaf [..., d] of shape [...], of a
        vector or scalar of its own shape.
    """

    sums: PyTree


def scale_by_rowwise_adagrad(
    initial_accumulator_value: ArrayLike = 0.0, eps: ArrayLike = 1e-8
) -> optax.GradientTransformation:
    """Adagrad with one accumulator a row, for dense gradients and rows.

        s_r <- s_r + mean(g_r^2),    u_r = g_r / (sqrt(s_r) + eps)

    A row is along the last axis, so that the layers of a stacked leaf [L, m, n] have
    their own; of a vector each element is one. State: 4 bytes a row. A row whose
    gradient is zero stays, and so does its state. A gradient that is not finite makes
    its row's accumulator so.

    Args:
      initial_accumulator_value: of s.
      eps: added to the root.

    Returns:
      An `optax.GradientTransformation`.

    Raises:
      TypeError, ValueError: arguments that are no numbers of at least 0.

    Source:
      The row-wise Adagrad of FBGEMM and DLRM; Duchi et al. (2011).

    Example::

      tx = optax.chain(jaxmem.optim.scale_by_rowwise_adagrad(), optax.scale(-0.1))
    """
    check_scalar("initial_accumulator_value", initial_accumulator_value, at_least=0)
    check_scalar("eps", eps, at_least=0)

    def init(params):
        # like a column, so that it is sharded as the rows are
        column = lambda p: p[..., 0] if p.ndim > 1 else p
        full = lambda p: jnp.full_like(
            column(jnp.asarray(p)), initial_accumulator_value, jnp.float32
        )
        return RowwiseAdagradState(jax.tree.map(full, params))

    def update(updates, state, params=None):
        del params
        squared = lambda g: jnp.square(g.astype(jnp.float32))
        mean = lambda g: jnp.mean(squared(g), axis=-1) if g.ndim > 1 else squared(g)
        check_class("rowwise_adagrad", state, RowwiseAdagradState)

        def added(path, g, s):
            if s.shape != (new := mean(g)).shape:
                raise ValueError(
                    f"state.sums{jax.tree_util.keystr(path)}={shown(s)}: the rows of "
                    f"its gradient are {new.shape}; the state is of other parameters"
                )
            return s + new

        sums = jax.tree_util.tree_map_with_path(added, updates, state.sums)

        def scaled(g, s):
            root = jnp.sqrt(s) + jnp.asarray(eps, jnp.float32)
            # where eps is 0 too, a row that has seen no gradient does not move
            inverse = jnp.where(root > 0, 1 / jnp.where(root > 0, root, 1.0), 0.0)
            return (g.astype(jnp.float32) * broadcast_rows(inverse, g)).astype(g.dtype)

        return jax.tree.map(scaled, updates, sums), RowwiseAdagradState(sums)

    return held_by_keys(optax.GradientTransformation(init, update))


def rowwise_adagrad(
    learning_rate: optax.ScalarOrSchedule,
    initial_accumulator_value: ArrayLike = 0.0,
    eps: ArrayLike = 1e-8,
) -> optax.GradientTransformationExtraArgs:
    """Adagrad with one accumulator a row, run on the touched rows of tables.

        s_r <- s_r + mean(g_r^2),    p_r <- p_r - lr g_r / (sqrt(s_r) + eps)

    The same as with dense gradients: rows without a gradient do not move. Other
    parameters in the tree have one accumulator for each row along the last axis;
    `optax.partition` gives them another optimizer. State: 4 bytes a row.

    Args:
      learning_rate: a scalar, or a schedule of the number of steps.
      initial_accumulator_value: of s.
      eps: added to the root.

    Returns:
      An `optax.GradientTransformationExtraArgs`, to be called with the `RowGradients`
      of `value_and_row_grad`.

    Raises:
      TypeError, ValueError: arguments that are no numbers of at least 0; else as
        `rowwise`.

    Source:
      The row-wise Adagrad of FBGEMM and DLRM; Duchi et al. (2011).

    Example::

      tx = optax.partition(
          {"tables": jaxmem.optim.rowwise_adagrad(0.05), "rest": optax.adamw(1e-3)},
          {"embed": "tables", "layers": "rest", "head": "rest"},
      )
    """
    rate = check_rate("learning_rate", learning_rate)
    scaled = scale_by_rowwise_adagrad(initial_accumulator_value, eps)
    return rowwise(optax.chain(scaled, optax.scale_by_learning_rate(rate)))


def rowwise_sgd(
    learning_rate: optax.ScalarOrSchedule,
) -> optax.GradientTransformation:
    """SGD without momentum, whose updates of tables are rows, without a sort.

        p_r <- p_r - lr g_r

    Linear in the gradient, so that rows of an id that comes twice are added as they
    come: nothing is deduplicated. The result is that of `optax.sgd`, to the order of
    sums. State: none beyond the count of a schedule. Dense gradients are taken too, for
    other parameters and from `jaxmem.microbatch`.

    Args:
      learning_rate: a scalar, or a schedule of the number of steps.

    Returns:
      An `optax.GradientTransformation`.

    Raises:
      TypeError, ValueError: a learning rate that is none.

    Source:
      Plain SGD.

    Example::

      tx = jaxmem.optim.rowwise_sgd(0.1)
    """
    rate = optax.scale_by_learning_rate(check_rate("learning_rate", learning_rate))

    def update(updates, state, params=None):
        rows = jax.tree.map(_rows, updates, is_leaf=is_rows)
        scaled, state = rate.update(rows, state, params)
        put = lambda g, u: g.with_rows(u) if is_rows(g) else u
        return jax.tree.map(put, updates, scaled, is_leaf=is_rows), state

    return optax.GradientTransformation(rate.init, update)


def _rows(g):
    return g.rows if is_rows(g) else g
