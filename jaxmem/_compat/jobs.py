"""What the processes of a distributed job share."""

from typing import Any

import jax


class JobStore:
    """What the processes of a distributed job share, by name."""

    def __init__(self):
        from jax._src.distributed import global_state

        self._client: Any = global_state.client

    def set(self, name: str, value: bytes) -> None:
        """Stores a value, over what was there."""
        self._client.key_value_set_bytes(name, value, allow_overwrite=True)

    def wait(self, name: str, seconds: float) -> bytes | None:
        """The value of a name; None where nobody stores one for so long."""
        try:
            return self._client.blocking_key_value_get_bytes(name, int(1e3 * seconds))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            return None

    def under(self, folder: str) -> dict[str, bytes]:
        """All values whose names start with `folder`."""
        return dict(self._client.key_value_dir_get_bytes(folder))
