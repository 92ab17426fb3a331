"""Plain JAX: a model is a pytree of arrays, or a function of one."""

import inspect
from typing import Any, ClassVar

from jaxmem.frameworks.pytrees import Pytrees


class Plain(Pytrees):
    """What belongs to no other framework; it is not registered."""

    name: ClassVar[str] = "plain"
    module: ClassVar[str | None] = None

    def is_model(self, x: Any) -> bool:
        return callable(x) and not inspect.isclass(x)


PLAIN = Plain()
