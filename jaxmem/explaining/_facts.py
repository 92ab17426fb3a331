"""What a log says, before anything is concluded from it."""

from dataclasses import dataclass
from typing import Literal

Stage = Literal["compile", "load", "run", "start", "kernel", "library", "host"]
Device = Literal["GPU", "TPU", "CPU", "host"]


@dataclass(frozen=True)
class LargeBuffer:
    """An array, or equal pieces of memory, that a log or an estimate lists.

    Attributes:
      bytes: of all of them, padding included.
      array: the type as JAX prints it, `bf16[8,4096,4096]`; "" where it is not told.
      operation: the JAX operation that computes it, or "argument" and the like.
      module: the modules that compute it, `Net/layers_3/mlp`.
      source: `file:line`.
      padding_bytes: of these, what the layout of a TPU adds.
      count: how many.
    """

    bytes: int
    array: str = ""
    operation: str = ""
    module: str = ""
    source: str = ""
    padding_bytes: int = 0
    count: int = 1


@dataclass(frozen=True)
class Facts:
    """The figures of a log, in bytes; None where it does not have one.

    Attributes:
      stage: what failed: to compile a program, to load it, to allocate an array or the
        temporaries of a program while it runs, to begin, to lay out a kernel, to make
        the handle of a library; or the memory of the host.
      device: whose memory it is.
      program: the function that was compiled, "" where it is not told.
      requested: what could not be allocated.
      needed: what the program takes in all, or its temporaries alone.
      limit: what there is, for the program or for the allocator.
      in_use: what was allocated when it failed.
      free: what was not.
      largest_free: the largest piece of that.
      device_free, device_total: of the whole device, as CUDA reports them.
      refused: what the driver refused to the allocator.
      arguments: of the program.
      outputs: of the program.
      shared: of the outputs, what lies in donated arguments.
      constants: inside the program, or captured from Python.
      padding: of the temporaries, what the layout adds.
      largest: the buffers that are listed, the largest first.
      autotuning: "product" or "convolution" where kernels for one were being tried.
      temporaries_alone: whether `needed` leaves out arguments.
      of_chip: whether `limit` is the chip's whole memory, and not of the log.
      pinned: whether it is the host's memory that a GPU reads.
      chip: the target that the user names, "" for none.
      chip_bytes: its memory.
    """

    stage: Stage
    device: Device
    program: str = ""
    requested: int | None = None
    needed: int | None = None
    limit: int | None = None
    in_use: int | None = None
    free: int | None = None
    largest_free: int | None = None
    device_free: int | None = None
    device_total: int | None = None
    refused: int | None = None
    arguments: int | None = None
    outputs: int | None = None
    shared: int | None = None
    constants: int | None = None
    padding: int | None = None
    largest: tuple[LargeBuffer, ...] = ()
    autotuning: str = ""
    temporaries_alone: bool = False
    of_chip: bool = False
    pinned: bool = False
    chip: str = ""
    chip_bytes: int | None = None

    @property
    def undonated(self) -> int:
        """Outputs that could lie in arguments, and do not."""
        if self.arguments is None or self.outputs is None or self.shared is None:
            return 0
        return max(min(self.arguments, self.outputs) - self.shared, 0)
