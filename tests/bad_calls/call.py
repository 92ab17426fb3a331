"""A call and its bad values; values that are wrong for a kind of argument."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class Call:
    """`fn(**good)`, and by argument what must be refused in its place.

    `trace`: the good call is traced and not run. `unchecked`: it is left
    out, since it would compile or write a file.
    """

    name: str
    fn: Callable[..., Any]
    good: Mapping[str, Any]
    bad: Mapping[str, Sequence[Any]]
    trace: bool = False
    unchecked: bool = False

    def run(self, **changed: Any) -> Any:
        return self.fn(**{**self.good, **changed})

    def check(self) -> None:
        """The good call is one."""
        if self.unchecked:
            return
        if self.trace:
            jax.eval_shape(lambda: jax.tree.leaves(self.run()))
        else:
            self.run()


NAN, INF = float("nan"), float("inf")
ARRAY = np.ones((2, 2), np.float32)

NOT_INT = ("8", 1.5, True, [8], {}, ARRAY)
COUNT = (*NOT_INT, 0, -1, np.int64(0))
NOT_NEGATIVE_INT = (*NOT_INT, -1)
NOT_NUMBER = ("0.5", True, [0.5], {}, ARRAY, 1j, NAN)
SHARE = (*NOT_NUMBER, -0.1, 1.1, INF, np.float32(-1.0))  # in [0, 1]
POSITIVE = (*NOT_NUMBER, 0, -1.0, INF)
NOT_NEGATIVE = (*NOT_NUMBER, -1e-3, INF)
FLAG = (None, 1, 0.0, "yes", [])
FUNCTION = (None, 3, "relu", [])
FUNCTION_OR_NONE = (3, "relu", [])
WORD = ("banana", "", 3, True, ["x"])
DTYPE = ("banana", 3.5, [1], jnp.int32, "bool")
BYTES = ("", "3.3.3GiB", "14 bananas", "-1GiB", INF, NAN, -1, True, [1], {}, 1j)
NUMBERS = ("0", 1.5, True, [0.5], {0: 1}, [True])  # positions
NAMES = (3, [3], "", [""], {"x": 1})
OPTIONS = ("x", 3, ["a"], {1: 2})
TARGET = ("", "banana", 3, True, ["h100"])
NOT_ARRAY = (None, "x", {}, object)
