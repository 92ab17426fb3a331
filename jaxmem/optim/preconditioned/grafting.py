"""Grafting: the length of a step is that of another rule's step."""

from typing import Any, Literal, NamedTuple

import jax.numpy as jnp

Grafting = Literal["adam", "rmsprop", "sgd"]
_LEAST = 1e-16  # added to a length that is divided by


class GraftingRule(NamedTuple):
    """The rule whose length it is; `kind` of None grafts nothing.

    Attributes:
      kind: see `shampoo`.
      b2: decay of the second moment.
      eps: added to its root.
    """

    kind: Grafting | None
    b2: Any
    eps: Any

    @property
    def has_moment(self) -> bool:
        """Whether the rule keeps a second moment."""
        return self.kind in ("adam", "rmsprop")

    def step(self, t, g, ahead, v) -> tuple[Any, Any]:
        """The rule's own step, elementwise, and its second moment.

        Args:
          t: the number of this step, from 1 on, float32[].
          g: the gradient.
          ahead: its corrected first moment, which the rule has in common with Shampoo.
          v: the second moment, or None.
        """
        if not self.has_moment:
            return ahead, v
        v = self.b2 * v + (1 - self.b2) * jnp.square(g)
        correct = 1 - self.b2**t if self.kind == "adam" else 1.0
        return ahead / (jnp.sqrt(v / correct) + self.eps), v

    def grafted(self, u, step):
        """`u` with the length of `step`."""
        if self.kind is None:
            return u
        length = lambda x: jnp.sqrt(jnp.sum(jnp.square(x)))
        return u * (length(step) / (length(u) + _LEAST))
