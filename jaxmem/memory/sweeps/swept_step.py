"""A step in one of the sizes of a sweep, on one chip."""

from dataclasses import dataclass
from typing import Any

from jaxmem.memory.report.report import MemoryReport

BATCH = "batch"  # the name whose values are examples
_SIZES = ("peak_bytes", "argument_bytes", "temp_bytes", "output_bytes")


@dataclass(frozen=True)
class SweptStep:
    """A step in one size, on one chip.

    Attributes:
      sizes: name -> value, as `make` was given them.
      target: the chip's name.
      memory_bytes: the chip's memory; None where it is not known.
      report: of `jaxmem.estimate`; None where the compiler could not fit the chip.
      why: what the compiler said in that case.
    """

    sizes: dict[str, Any]
    target: str
    memory_bytes: int | None
    report: MemoryReport | None
    why: str = ""

    @property
    def peak_bytes(self) -> int | None:
        """Bytes of the peak on one device; None where it could not be compiled."""
        return None if self.report is None else self.report.peak_bytes

    @property
    def seconds(self) -> float | None:
        """Predicted seconds of one step; None without rates of the chip."""
        return None if self.report is None else self.report.seconds

    @property
    def fits(self) -> bool | None:
        """Whether the chip's memory is enough; None where it is not known."""
        if self.report is None:
            return False
        return None if self.memory_bytes is None else self.report.fits()

    @property
    def per_second(self) -> float | None:
        """Examples a second, where one of the names is "batch"."""
        batch = self.sizes.get(BATCH)
        return batch / self.seconds if batch and self.seconds else None

    def to_dict(self) -> dict[str, Any]:
        """Its fields, with the bytes of the report and without the report."""
        sizes = {name: getattr(self.report, name, None) for name in _SIZES}
        own = {"seconds": self.seconds, "examples_per_second": self.per_second}
        about = {"target": self.target, "memory_bytes": self.memory_bytes}
        told = {"fits": self.fits, "why": self.why or None}
        return {"sizes": self.sizes, **about, **sizes, **own, **told}
