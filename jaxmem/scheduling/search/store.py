"""What the processes of a job share."""

from typing import Protocol


class Store(Protocol):
    """Values by name, which every process of a job sets and reads."""

    def set(self, name: str, value: bytes) -> None: ...

    def wait(self, name: str, seconds: float) -> bytes | None: ...

    def under(self, folder: str) -> dict[str, bytes]: ...
