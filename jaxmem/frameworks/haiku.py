"""Haiku: a model is a pair of functions, and its parameters are a pytree."""

import sys
from collections.abc import Callable
from typing import Any, ClassVar

from jaxmem.frameworks.pytrees import Pytrees


class Haiku(Pytrees):
    """What `hk.transform` returns is substituted by its `apply`."""

    name: ClassVar[str] = "haiku"
    module: ClassVar[str | None] = "haiku"

    def is_model(self, x: Any) -> bool:
        haiku = sys.modules["haiku"]
        return isinstance(x, haiku.Transformed | haiku.TransformedWithState)

    def forward(self, model: Any) -> Callable:
        return model.apply

    def with_forward(self, model: Any, fn: Callable) -> Any:
        """Initial values are Haiku's own."""
        return model._replace(apply=fn)
