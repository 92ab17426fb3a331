"""The class of the state that an update is given."""

from typing import Any

from jaxmem._checks import wrong_type


def check_class(name: str, state: Any, cls: type) -> None:
    """TypeError for a state of another transformation.

    Args:
      name: of the optimizer, for the message.
      state: what the update was given.
      cls: what its init makes.
    """
    if not isinstance(state, cls):
        allowed = (
            f"the {cls.__name__} that {name}'s init makes, in update(updates, state, "
            "params)"
        )
        raise wrong_type("state", state, allowed)
