"""What the battery of optimizers knows of one of them."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import optax

LR = 1e-2
STEPS = 50


@dataclass(frozen=True)
class Case:
    """An optimizer, and what it is held to.

    Attributes:
      name: of the test.
      make: the transformation, with the learning rate it is given.
      reference: parameters after every gradient, in numpy float64: of the leaf's path
        (`"layers"`, `"w"`, `"b"`), the parameter and the gradients [steps, ...]. A
        stacked leaf comes one layer at a time.
      prepared: what is done to the gradients before the rule is compared: [steps, ...]
        a leaf, float32.
      rtol: bound of the error of an update over all steps, relative to how far the
        parameter has moved; derived where it is not float32's.
      released: whether `schedule` updates the stacked leaf inside the backward scan.
      microbatch: how n micro-batches differ from the whole batch: "same", to rounding;
        "other", as the rule says (AdamA's); or the message with which it is refused.
      needs_params: whether `update` needs the parameters.
      sharded: whether the state of a leaf has the leaf's sharding where shapes match.
    """

    name: str
    make: Callable[..., optax.GradientTransformation]
    reference: Callable[[str, np.ndarray, np.ndarray], np.ndarray]
    prepared: Callable[[np.ndarray], np.ndarray] = lambda grads: grads
    rtol: float = 1e-5
    released: bool = True
    microbatch: str = "same"
    needs_params: bool = False
    sharded: bool = True
