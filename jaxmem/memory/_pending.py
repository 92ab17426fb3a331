"""A compile that was asked for, and the report that will be made of it.

Several can be under way at once: begin them all, then ask each for its result.
"""

import os
from dataclasses import dataclass, field
from typing import Any, Literal

from jaxmem.memory import _cache
from jaxmem.memory._compile import Artefact
from jaxmem.memory._donation import Donations
from jaxmem.memory._pool import Compile, CompileError, own_flags, pool
from jaxmem.memory._report import MemoryReport, make_report, pack
from jaxmem.memory._step import Step
from jaxmem.memory._targets import Target

# How far a compile goes: to the end; to the end where a figure depends on it; or until
# the buffers are assigned, when on a TPU the bytes are nearly what they will be.
Extent = Literal["all", "needed", "buffers"]

_NO_TILES = "Couldn't find output tile sizes"
# Exponents of 2: products of matrices with fewer elements together XLA emits itself.
PRODUCTS = (21, 24, 27, 30, 35, 40)


def generates_code(artefact: Artefact, extent: Extent) -> bool:
    """Whether a compile goes on when the buffers are assigned.

    For a GPU all figures are known by then; for a TPU they are not the last, and on CPU
    the count of operations comes later. A kernel is compiled with the code, and may be
    refused there.
    """
    if extent == "needed":
        return artefact.kernels or artefact.request["target"]["platform"] != "cuda"
    return extent == "all" or artefact.kernels


@dataclass
class Pending:
    """The report of a step, once it is there.

    Attributes:
      artefact: the lowered step.
      step: its leaves.
      chip: what it is compiled for.
      donations: what notes on donation are made of.
      timeout: seconds that the compile may take.
      extent: how far the compile goes.
      cache: whether a result on disk may be used.
      products: exponent of 2: products of matrices with fewer elements together XLA:GPU
        emits itself, and leaves the others to a library; None for its own threshold.
        Where XLA finds no way it is raised.
      final: whether the report, once there, has the figures of a compile to the end.
    """

    artefact: Artefact
    step: Step
    chip: Target
    donations: Donations
    timeout: float
    extent: Extent = "needed"
    cache: bool = True
    products: int | None = None
    final: bool = field(default=False, init=False)
    _compile: Compile | None = field(default=None, init=False)
    _report: MemoryReport | None = field(default=None, init=False)

    def begin(self) -> "Pending":
        """Starts the compile, where nothing is known of it."""
        found = self._stored()
        if found is None:
            self._compile = self._submit(self.products)
        else:
            self._report = self._made(found)
        return self

    def result(self) -> MemoryReport:
        """The report.

        Raises:
          CompileError, TimeoutError.
        """
        if self._report is None:
            result = self._compiled()
            # asked for without it, the next one need not find out anew
            for products in {self.products, result["products"]}:
                _cache.store(self._key(self._code, products), result)
            self._report = self._made(result)
        return self._report

    @property
    def done(self) -> bool:
        """Whether the report is there."""
        return self._report is not None

    def cancel(self) -> None:
        """Ends the compile, which nobody will ask for."""
        if self._report is None and self._compile is not None:
            self._compile.cancel()

    @property
    def _code(self) -> bool:
        return generates_code(self.artefact, self.extent)

    def _key(self, code: bool, products: int | None) -> str:
        flags = own_flags(), os.environ.get("LIBTPU_INIT_ARGS", "")
        return _cache.key_of(self.artefact.key, flags, code, products)

    def _stored(self) -> dict[str, Any] | None:
        """A result on disk; one of a whole compile will always do."""
        if not self.cache:
            return None
        for code in dict.fromkeys((True, self._code)):
            if (found := _cache.load(self._key(code, self.products))) is not None:
                return found
        return None

    def _submit(self, products: int | None) -> Compile:
        request = dict(self.artefact.request)
        if products is not None:
            request["compiler_options"] = emitting(
                request["compiler_options"], products
            )
        return pool().submit(request, self.timeout, code=self._code)

    def _compiled(self) -> dict[str, Any]:
        """The compiler's answer, with products emitted where it found no way."""
        assert self._compile is not None
        tried = self.products
        while True:
            try:
                result = self._compile.result()
            except CompileError as error:
                larger = [p for p in PRODUCTS if tried is None or p > tried]
                if _NO_TILES not in str(error) or not larger:
                    raise
                tried = larger[0]
                self._compile = self._submit(tried)
                continue
            kept = {k: result[k] for k in ("memory", "cost", "aliases")}
            about = {"products": tried, "code": self._code}
            return kept | about | {"texts": pack(result["dump"])}

    def _made(self, result: dict[str, Any]) -> MemoryReport:
        self.products = result["products"]
        on_gpu = self.artefact.request["target"]["platform"] == "cuda"
        self.final = result["code"] or on_gpu
        notes = () if self.products is None else (_emitted_note(self.products),)
        return make_report(
            result | {"notes": notes},
            target=self.chip,
            name=self.step.name,
            argument_names=[self.step.leaves[i].name for i in self.artefact.kept],
            donations=self.donations,
        )


def emitting(options: dict[str, Any] | None, products: int) -> dict[str, Any]:
    """Options for XLA:GPU by which the smaller products are its own, see `Pending`."""
    disabled = (options or {}).get("xla_disable_hlo_passes", "")
    return (options or {}) | {
        "xla_gpu_gemm_rewrite_size_threshold": 2**products,
        "xla_disable_hlo_passes": ",".join(
            filter(None, [disabled, "cublas-pad-for-gemms"])
        ),
    }


def _emitted_note(products: int) -> str:
    return (
        "without the device XLA found no tiles for a product, and was told to emit "
        f"products of matrices with fewer than 2^{products} elements itself, and to "
        "pad none for cuBLAS: temporaries may differ by some per cent from those on "
        "the device"
    )
