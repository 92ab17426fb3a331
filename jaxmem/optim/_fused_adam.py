"""Adam and AdamA that write parameters and moments themselves.

One pass over a leaf reads the parameter, the moments and the gradient and writes the
new ones. So the new parameter exists in float32 before it is rounded, and a bfloat16
parameter can be rounded stochastically: most steps are smaller than half a unit in its
last place, and would otherwise be lost.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Int32, PyTree

from jaxmem._checks import check_count, check_key, check_scalar, shown
from jaxmem.optim._adama import scale_by_adama
from jaxmem.optim._adama_arguments import check_mask, check_rate, check_state
from jaxmem.optim._adama_rule import AdamAState
from pallas_kernels import adam, simulated_platform
from pallas_kernels.adam import Factors, uses_bits
from pallas_kernels.dispatch import (
    Implementation,
    check_implementation,
    dispatch,
    kernel_module,
)


@dataclass(frozen=True)
class FusedAdam:
    """Adam, AdamW and AdamA as one pass that returns new parameters.

    `step` is `optax.adamw(...).update` and `optax.apply_updates` in one; `accumulate`
    and `apply` are the two halves of AdamA (`scale_by_adama` has the rule). With state
    and parameters donated to the `jax.jit` round it, all arrays are written in place;
    let it take and return them in the same order.

    With `rng` parameters in bfloat16 are rounded stochastically, up or down with the
    probabilities that make the mean exact: no float32 copy of them is needed for small
    steps to count. The bits come from the key, the number of the step and the
    element's place in its leaf; XLA and kernels have the same.

    Kernels are for one device: under a `jax.jit` over several, call it inside
    `jax.shard_map` (elements are independent; parameters that are the same on several
    devices need the same key there). Under `vmap` XLA does the kernel's work on GPU.

    Args:
      learning_rate: a scalar, or a schedule of the number of finished steps.
      b1: decay of the first moment, in [0, 1).
      b2: decay of the second moment, in [0, 1).
      eps: added to the denominator outside the square root.
      eps_root: added inside the square root.
      mu_dtype: dtype of the first moment; None: the parameter's.
      nu_dtype: dtype of the second moment; None: the parameter's, which as bfloat16
        stalls, see `scale_by_adama`.
      weight_decay: decoupled weight decay, multiplied by the learning rate; a scalar,
        or a schedule.
      mask: where to decay the weights: a tree of bools (or its first levels), or a
        function of the parameters that gives one.
      implementation: "xla"; "pallas" for the kernel (TPU; NVIDIA from compute
        capability 9.0 on; float32 and bfloat16, on GPU float16 too); None for the
        kernel where it was measured to be no slower.

    Raises:
      ValueError: an argument out of its range; trees or shapes that do not fit each
        other; `implementation="pallas"` where no kernel is.
      TypeError: from `init`, parameters that are no real floating arrays.

    Source:
      Kingma and Ba (2015), arXiv 1412.6980; weight decay as in arXiv 1711.05101; AdamA:
      Zhang et al. (2023), arXiv 2305.19982.

    Example::

      adam = jaxmem.optim.FusedAdam(3e-4, weight_decay=0.1)
      state = adam.init(params)

      @functools.partial(jax.jit, donate_argnums=(0, 1))
      def train_step(params, state, batch, key):
          grads = jax.grad(loss_fn)(params, batch)
          return adam.step(grads, state, params, rng=key)
    """

    learning_rate: optax.ScalarOrSchedule
    b1: ArrayLike = 0.9
    b2: ArrayLike = 0.999
    eps: ArrayLike = 1e-8
    eps_root: ArrayLike = 0.0
    mu_dtype: DTypeLike | None = jnp.float32
    nu_dtype: DTypeLike | None = jnp.float32
    weight_decay: optax.ScalarOrSchedule = 0.0
    mask: PyTree | Callable[[PyTree], PyTree] | None = None
    implementation: Implementation | None = field(default=None, kw_only=True)

    def __post_init__(self):
        check_implementation(self.implementation)
        check_rate("learning_rate", self.learning_rate)
        check_rate("weight_decay", self.weight_decay)
        check_mask(self.mask)
        self._moments()

    def init(self, params: PyTree) -> AdamAState:
        """Moments of zero, sharded as the parameters: the state of `scale_by_adama`."""
        state: Any = self._moments().init(params)
        return state

    def step(
        self,
        grads: PyTree,
        state: AdamAState,
        params: PyTree,
        *,
        rng: Array | None = None,
        micro_batches: int | Int32[Array, ""] = 1,
        weight: ArrayLike | None = None,
    ) -> tuple[PyTree, AdamAState]:
        """(parameters, state) after a gradient, in one pass.

        After `accumulate` this takes the last micro-batch and ends the mini-batch.

        Args:
          grads: the gradient, shaped as the parameters, in any float dtype.
          state: of `init`, `step`, `accumulate` or `apply`.
          params: the parameters.
          rng: a key for stochastic rounding of bfloat16 parameters, the same for all
            steps if you like; None: to the nearest.
          micro_batches: N, as for `accumulate`.
          weight: as for `accumulate`.
        """
        _check_trees(state, grads=grads, params=params)
        return self._update(grads, state, params, micro_batches, weight, rng)

    def accumulate(
        self,
        grads: PyTree,
        state: AdamAState,
        *,
        micro_batches: int | Int32[Array, ""],
        weight: ArrayLike | None = None,
    ) -> AdamAState:
        """The state with a micro-batch's gradient in its moments.

        Args:
          grads: the gradient of the mean loss of this micro-batch.
          state: the state.
          micro_batches: N, in how many a mini-batch comes.
          weight: scalar instead of 1/N.
        """
        _check_trees(state, grads=grads)
        return self._update(grads, state, None, micro_batches, weight, None)[1]

    def apply(
        self, state: AdamAState, params: PyTree, *, rng: Array | None = None
    ) -> tuple[PyTree, AdamAState]:
        """(parameters, state) at the end of a mini-batch; `rng` as for `step`."""
        _check_trees(state, params=params)
        return self._update(None, state, params, 1, None, rng)

    def _moments(self) -> optax.GradientTransformation:
        return scale_by_adama(
            self.b1, self.b2, self.eps, self.eps_root, self.mu_dtype, self.nu_dtype
        )

    def _update(self, grads, state, params, n, weight, rng):
        n = check_count("micro_batches", n)
        if weight is not None:
            check_scalar("weight", weight)
        if rng is not None:
            check_key("rng", rng)
        tree = jax.tree.structure(state.mu)
        leaves = _leaves(tree, p=params, m=state.mu, v=state.nu, g=grads)
        _check_shapes(state.mu, leaves)
        factors = self._factors(state, n, weight)
        plain = factors._replace(decay=0.0)
        vectors = {True: _vector(factors), False: _vector(plain)}
        decayed = _mask_leaves(self.mask, params, len(leaves))
        seeds = _seeds(rng, state, leaves)
        with jax.named_scope("jaxmem.fused_adam"):
            new = [
                update_leaf(self.implementation, leaf, vectors[decay], seed)
                for leaf, decay, seed in zip(leaves, decayed, seeds, strict=True)
            ]
        gathered = lambda name: tree.unflatten([x[name] for x in new])
        if grads is not None:
            state = state._replace(
                mu=gathered("m"),
                nu=gathered("v"),
                micro_step=state.micro_step + 1,
                micro_batches=jnp.asarray(n, jnp.int32),
            )
        if params is not None:
            params = gathered("p")
            state = state._replace(
                count=optax.safe_increment(state.count),
                micro_step=jnp.zeros_like(state.micro_step),
            )
        return params, state

    def _factors(self, state: AdamAState, n, weight) -> Factors:
        """As `scale_by_adama` and optax have them, to the bit."""
        count = optax.safe_increment(state.count)
        first = state.micro_step == 0
        number = lambda x: jnp.asarray(x, float)
        at = lambda x: x(state.count) if callable(x) else x
        decay = lambda b: jnp.where(first, number(b), number(1.0))
        unbias = lambda b: 1 / (1 - lax.pow(number(b), count))
        return Factors(
            scale=1 / number(n) if weight is None else weight,
            m_decay=decay(self.b1),
            m_add=1 - self.b1,
            v_decay=decay(self.b2),
            v_add=1 - self.b2,
            m_unbias=unbias(self.b1),
            v_unbias=unbias(self.b2),
            eps=self.eps,
            eps_root=self.eps_root,
            decay=at(self.weight_decay),
            rate=at(self.learning_rate),
        )


def _check_trees(state, **trees) -> None:
    """Errors for what is no state of FusedAdam, and for trees not as its parameters."""
    check_state(state)
    wanted = jax.tree.structure(state.mu)
    for name, tree in trees.items():
        if jax.tree.structure(tree) != wanted:
            raise ValueError(
                f"{name}={shown(tree)}: not of the structure of the parameters that "
                f"the state was made for, {shown(state.mu)}"
            )


def _leaves(tree, **trees) -> list[dict[str, Any]]:
    """A dict a leaf, of those trees that there are."""
    rows = {k: tree.flatten_up_to(t) for k, t in trees.items() if t is not None}
    return [
        dict(zip(rows, row, strict=True)) for row in zip(*rows.values(), strict=True)
    ]


def _vector(factors: Factors):
    return jnp.stack([jnp.asarray(x, float) for x in factors])


def _mask_leaves(mask, params, count: int) -> list[bool]:
    if mask is None or params is None:
        return [True] * count
    mask = mask(params) if callable(mask) else mask
    return [bool(x) for x in jax.tree.leaves(jax.tree.broadcast(mask, params))]


def _seeds(rng, state: AdamAState, leaves) -> list:
    """Two words a leaf, other ones each step; None where nothing is rounded by them."""
    random = [uses_bits(leaf, rng) for leaf in leaves]
    if not any(random):
        return [None] * len(leaves)
    key = jax.random.fold_in(rng, state.count)
    words = jax.random.bits(key, (len(leaves), 2), jnp.uint32)
    return [words[i] if wanted else None for i, wanted in enumerate(random)]


def _check_shapes(tree, leaves) -> None:
    paths = jax.tree_util.tree_flatten_with_path(tree)[0]
    for (path, _), leaf in zip(paths, leaves, strict=True):
        shapes = [jnp.shape(x) for x in leaf.values()]
        if len(set(shapes)) > 1:
            name = jax.tree_util.keystr(path)
            raise ValueError(
                f"FusedAdam: parameter, moments and gradient at {name or 'the root'} "
                f"have shapes {', '.join(map(str, shapes))}: they must be the same"
            )


def update_leaf(
    implementation: Implementation | None, old: dict[str, Any], factors, seed
) -> dict[str, Any]:
    """What changes of "p", "m" and "v"; `adam.update_leaf` has the arguments."""
    how = implementation, simulated_platform()
    return _jitted(*how)(old, factors, seed)


@functools.cache
def _jitted(implementation, simulated):
    """Leaves of one shape are traced and lowered once, a kernel takes a while."""
    del simulated  # what was traced outside of a simulation is not for inside

    def adam_leaf(*leaf):
        return dispatch(
            *("adam", implementation, *leaf),
            xla=adam.update_leaf,
            tpu=lambda *leaf: kernel_module("adam", "tpu").update(*leaf),
            gpu=lambda *leaf: kernel_module("adam", "gpu").update(*leaf),
            sized_by=leaf[0].get("p", leaf[0]["m"]),
        )

    return jax.jit(adam_leaf)
