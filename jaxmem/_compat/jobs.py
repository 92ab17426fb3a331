"""What the processes of a distributed job share."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax


class JobStore:
    """What the processes of a distributed job share, by name.

    jax keeps it in process 0. RuntimeError where that is gone, unless jax ends this
    process first, which it does by default at about the same time.
    """

    def __init__(self):
        from jax._src.distributed import global_state

        self._client: Any = global_state.client

    def set(self, name: str, value: bytes) -> None:
        """Stores a value, over what was there."""
        with _reached():
            self._client.key_value_set_bytes(name, value, allow_overwrite=True)

    def wait(self, name: str, seconds: float) -> bytes | None:
        """The value of a name; None where nobody stores one for so long."""
        milliseconds = int(1e3 * seconds)
        try:
            with _reached():
                return self._client.blocking_key_value_get_bytes(name, milliseconds)
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            return None

    def under(self, folder: str) -> dict[str, bytes]:
        """All values whose names start with `folder`."""
        with _reached():
            return dict(self._client.key_value_dir_get_bytes(folder))


@contextlib.contextmanager
def _reached() -> Iterator[None]:
    """Says so where there is no process 0."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "UNAVAILABLE" not in str(error):
            raise
        raise RuntimeError(
            "process 0 is gone, which keeps what the processes of this job share: "
            "start the job again"
        ) from error
