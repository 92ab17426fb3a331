"""GaLore for micro-batches: their gradients are added up in the subspace.

Between two refreshes the projection is linear, so the sum of projected gradients is the
projected sum. No array as large as the parameters holds gradients from one micro-batch
to the next.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int32, PyTree

from jaxmem.optim.accumulation import accumulating_state, accumulating_transformation
from jaxmem.optim.accumulation.devices import count_devices
from jaxmem.optim.low_rank.checks import check_state
from jaxmem.optim.low_rank.galore_rule import GaLoreRule, GaLoreState


@accumulating_state("accumulated")
class GaLoreSumState(NamedTuple):
    """State of `scale_by_galore` with `micro_batches` of more than one.

    Attributes:
      count: int32[], mini-batches finished.
      micro_step: int32[], micro-batches in the current mini-batch; 0 between two.
      micro_batches: int32[], how many a mini-batch is made of.
      accumulated: weighted sum of the projected gradients of this mini-batch, float32;
        of leaves that are not projected, of the gradients.
      galore: projectors and inner state.
    """

    count: Int32[Array, ""]  # pyright: ignore[reportIncompatibleMethodOverride]
    micro_step: Int32[Array, ""]
    micro_batches: Int32[Array, ""]
    accumulated: PyTree
    galore: GaLoreState


def accumulating(
    rule: GaLoreRule, micro_batches: int, axes: tuple[str, ...] = ()
) -> optax.GradientTransformationExtraArgs:
    """The transformation that takes one micro-batch's gradient at a time.

    Args:
      rule: the steps of an update.
      micro_batches: of a mini-batch, on each device.
      axes: mesh axes whose devices have micro-batches of their own.
    """

    def init(params: PyTree) -> GaLoreSumState:
        zero = lambda: jnp.zeros((), jnp.int32)
        n = jnp.full((), micro_batches, jnp.int32)
        state = rule.init(params)
        return GaLoreSumState(zero(), zero(), n, rule.zeros(params), state)

    def check(updates, state, phase, n, weight, keep) -> None:
        check_state(rule.name, init, updates, state)

    def accumulate(updates, state, n, weight, keep):
        share = 1 / n if weight is None else weight
        return _accumulate(rule, updates, state, share, keep, axes)

    def apply(updates, state, params):
        del params
        return _apply(rule, updates, _reduced(state, axes))

    return accumulating_transformation(
        *(init, accumulate, apply),
        check=check,
        micro_batches=micro_batches,
        axes=axes,
    )


def _accumulate(rule: GaLoreRule, updates, state: GaLoreSumState, weight, keep, axes):
    leaves, galore = rule.leaves(updates), state.galore
    first = state.micro_step == 0
    weight = jnp.asarray(weight, jnp.float32)
    kept, sums = [], []
    with jax.named_scope(f"jaxmem.{rule.name}.accumulate"):
        states = leaves.of(galore.projectors)
        totals = leaves.of(state.accumulated)
        for leaf, old, total in zip(leaves, states, totals, strict=True):
            kept.append(rule.refreshed(leaf, old, galore.count, keep, axes))
            term = weight * rule.project(leaf, kept[-1])
            if keep is not None:  # NaN times 0 is NaN
                term = jnp.where(keep, term, jnp.zeros_like(term))
            sums.append(term + jnp.where(first, jnp.zeros_like(total), total))
    return state._replace(
        micro_step=state.micro_step + 1,
        accumulated=leaves.tree_of(sums),
        galore=galore._replace(projectors=leaves.tree_of(kept)),
    )


def _reduced(state: GaLoreSumState, axes: tuple[str, ...]) -> GaLoreSumState:
    """The mean of the devices' sums: one all-reduce of what is accumulated."""
    if not axes:
        return state
    count_devices(axes)  # a clear error outside of their map
    with jax.named_scope("jaxmem.galore.reduce"):
        return state._replace(accumulated=jax.lax.pmean(state.accumulated, axes))


def _apply(rule: GaLoreRule, updates, state: GaLoreSumState):
    leaves, galore = rule.leaves(updates), state.galore
    with jax.named_scope(f"jaxmem.{rule.name}.apply"):
        low, inner = rule.in_subspace(state.accumulated, galore, {})
        back = [
            _back_by_layers(rule, u, leaf, s)
            for u, leaf, s in zip(
                leaves.of(low), leaves, leaves.of(galore.projectors), strict=True
            )
        ]
    count = optax.safe_increment(galore.count)
    galore = galore._replace(count=count, inner=inner)
    done = jnp.zeros_like(state.micro_step)
    return leaves.tree_of(back), state._replace(
        count=optax.safe_increment(state.count), micro_step=done, galore=galore
    )


def _back_by_layers(rule: GaLoreRule, low, leaf, projectors):
    """The update of a leaf; of a stacked one in a scan over its layers."""
    # There is no backward scan here. `jaxmem.schedule` moves into this one what is done
    # to the update, so that the update of all layers is never there at once.
    if projectors is None or leaf.value.ndim == 2:
        return rule.project_back(low, leaf, projectors)
    vectors = projectors._replace(refresh_at=None, lazy=None)

    def layer(item):
        x, low, vectors = item
        return rule.project_back(low, leaf._replace(value=x), vectors)

    return jax.lax.map(layer, (leaf.value, low, vectors))
