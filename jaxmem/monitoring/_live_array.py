"""A row of live arrays: plain data, which keeps no array alive."""

from dataclasses import dataclass


@dataclass(frozen=True)
class LiveArray:
    """An array with a name, or all those of one type that have none.

    Attributes:
      name: of the tree that it is in; "" for arrays that are in none.
      path: in that tree, `layers/0/kernel`.
      array: the type as JAX prints it, `f32[8,128]`.
      count: how many are alive.
      bytes: of this process's devices together.
      device_bytes: on the device that has most of them.
      memory: "device"; "pinned_host" and the like; or the platform of another backend.
      placement: "sharded over 8", "replicated over 8"; "" on one device.
      deleted: how many were donated or deleted, and have no memory any more.
      shares: the array whose buffer this one is, and where its bytes are counted.
    """

    name: str
    path: str
    array: str
    count: int = 0
    bytes: int = 0
    device_bytes: int = 0
    memory: str = "device"
    placement: str = ""
    deleted: int = 0
    shares: str = ""

    @property
    def place(self) -> str:
        """The path, which begins with the tree's name."""
        return "/".join(filter(None, [self.name, self.path]))

    @property
    def identity(self) -> tuple[str, ...]:
        """What tells a row from others, at any time."""
        return self.name, self.path, self.array, self.memory, self.placement
