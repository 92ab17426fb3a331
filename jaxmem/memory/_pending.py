"""A compile that was asked for, and the report that will be made of it.

Several can run at once: begin them all, then ask each for its result.
"""

import functools
import os
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from jaxmem._checks import check_bool, check_float, check_int, check_options
from jaxmem.chips import Target
from jaxmem.memory.compile import cache
from jaxmem.memory.compile.answer import CompileError
from jaxmem.memory.compile.facts import StepFacts
from jaxmem.memory.compile.kernels import accept, are_accepted
from jaxmem.memory.compile.lower import LoweredStep
from jaxmem.memory.compile.pool import Compile, caller_flags, pool
from jaxmem.memory.report.advice import LateAdvice
from jaxmem.memory.report.donation import Donations
from jaxmem.memory.report.report import MemoryReport, make_report, pack

# How far a compile goes: to the end; to the end where a figure depends on it; or until
# the buffers are assigned, when the bytes on a TPU are nearly the final ones.
Extent = Literal["all", "needed", "buffers"]

_NO_TILES = "Couldn't find output tile sizes"
_NO_CONFIG = "No supported config found for HLO: %gemm_fusion"
# Exponents of 2 to try as the threshold below which XLA emits matrix products itself.
THRESHOLDS = (21, 24, 27, 30, 35, 40)
_EMITTED = (
    "without the device XLA found no tiles for a product, and was told to emit "
    "products of matrices with fewer than 2^{} elements itself, and to pad none for "
    "cuBLAS: temporaries may differ by some per cent from those on the device"
)
_IN_LIBRARIES = (
    "without the device XLA found no form of its own for a product, and was told to "
    "leave all of them to cuBLAS: temporaries and predicted time may differ by some "
    "per cent from those on the device"
)
_PRINTS = (
    "jax.debug.print and jax.debug.callback are left out of what is compiled: an array "
    "that one of them shows stays in memory until it is printed"
)


def generates_code(lowered: LoweredStep, extent: Extent) -> bool:
    """Whether a compile goes on after the buffers are assigned."""
    # All figures of a GPU are known by then. On a TPU the buffers still change, and the
    # CPU's compiler counts operations at the end. Kernels are compiled during code
    # generation, and may be refused there.
    target = lowered.request["target"]
    if extent == "all" or not are_accepted(str(target), lowered.kernels):
        return True
    return extent == "needed" and target["platform"] != "cuda"


@dataclass(frozen=True)
class CompileSettings:
    """How a step is compiled."""

    timeout: float = 600.0  # seconds that the compile may take
    compiler_options: dict[str, Any] | None = None  # as for `jax.jit`
    cache: bool = True  # whether a result on disk may be used
    extent: Extent = "needed"
    # Exponent of 2; XLA:GPU emits products of matrices with fewer elements together
    # itself, and leaves the others to a library: all of them at 0. None is XLA's own
    # threshold.
    products: int | None = None
    advised: bool = True  # whether the report says what to do: not of a scheduled step
    # iterations of loops whose compiled text does not tell how often they run
    trips: int | None = None

    def checked(self) -> "CompileSettings":
        """The settings, with those of the user checked."""
        check_bool("cache", self.cache)
        timeout = check_float("timeout", self.timeout, above=0)
        options = check_options("compiler_options", self.compiler_options)
        if self.trips is not None:
            check_int("trips", self.trips, 1)
        return replace(self, timeout=timeout, compiler_options=options)


@dataclass
class Pending:
    """The report of a step, once it is there."""

    lowered: LoweredStep
    target: Target
    donations: Donations  # from which the report's notes on donation are made
    facts: StepFacts  # which a check of the module needs
    settings: CompileSettings
    products: int | None  # of the settings; raised where XLA finds no tiles
    advice: LateAdvice = field(default_factory=LateAdvice)
    final: bool = field(default=False, init=False)  # figures of a compile to the end
    _compile: Compile | None = field(default=None, init=False)
    _report: MemoryReport | None = field(default=None, init=False)

    def begin(self) -> "Pending":
        """Starts the compile, unless its result is known."""
        stored = self._stored()
        if stored is None:
            self._compile = self._submit(self.products)
        else:
            self._report = self._report_of(stored)
        return self

    def result(self) -> MemoryReport:
        """Waits for the report."""
        if self._report is None:
            result = self._compiled()
            # Stored under the threshold that was asked for, too: the next compile
            # without one need not fail first.
            for products in {self.products, result["products"]}:
                cache.store(self._key(self._code, products), result)
            self._report = self._report_of(result)
        return self._report

    @property
    def done(self) -> bool:
        """Whether the report is there."""
        return self._report is not None

    def cancel(self) -> None:
        """Ends the compile, whose result nobody needs."""
        if self._report is None and self._compile is not None:
            self._compile.cancel()

    @functools.cached_property  # kernels may be accepted while this one compiles
    def _code(self) -> bool:
        return generates_code(self.lowered, self.settings.extent)

    def _key(self, code: bool, products: int | None) -> str:
        flags = caller_flags(), os.environ.get("LIBTPU_INIT_ARGS", "")
        return cache.key_of(self.lowered.key, flags, code, products)

    def _stored(self) -> dict[str, Any] | None:
        """A result on disk; that of a compile to the end serves every extent."""
        if not self.settings.cache:
            return None
        for code in dict.fromkeys((True, self._code)):
            if (result := cache.load(self._key(code, self.products))) is not None:
                self._accept(result)
                return result
        return None

    def _accept(self, result: dict[str, Any]) -> None:
        """Remembers the kernels of what was compiled to the end."""
        if result["code"]:
            accept(str(self.lowered.request["target"]), self.lowered.kernels)

    def _submit(self, products: int | None) -> Compile:
        request = dict(self.lowered.request)
        if products is not None:
            options = emitting(request["compiler_options"], products)
            request["compiler_options"] = options
        return pool().submit(request, self.settings.timeout, code=self._code)

    def _compiled(self) -> dict[str, Any]:
        """The compiler's result, with the threshold raised until XLA finds tiles."""
        assert self._compile is not None
        products = self.products
        while True:
            try:
                result = self._compile.result()
            except CompileError as error:
                following = _following(products, str(error))
                if following is None:
                    raise
                products = following
                self._compile = self._submit(products)
                continue
            stored = {k: result[k] for k in ("memory", "cost", "aliases")}
            stored |= {"products": products, "code": self._code}
            self._accept(stored)
            return stored | {"texts": pack(result["dump"])}

    def _report_of(self, result: dict[str, Any]) -> MemoryReport:
        self.products = result["products"]
        self.final = result["code"] or self.target.platform == "cuda"
        notes = [] if self.products is None else [_told(self.products)]
        if self.lowered.prints:
            notes.append(_PRINTS)
        leaves = self.lowered.call.leaves
        return make_report(
            result | {"notes": tuple(notes)},
            target=self.target,
            name=self.lowered.call.name,
            argument_names=[leaves[i].name for i in self.lowered.used],
            donations=self.donations,
            advice=self.advice,
            facts=self.facts,
            trips=self.settings.trips,
        )


def _following(products: int | None, error: str) -> int | None:
    """The threshold to compile with next; None where another one does not help."""
    if products is None and _NO_CONFIG in error:
        return 0
    larger = (p for p in THRESHOLDS if products is None or p > products)
    return next(larger, None) if _NO_TILES in error else None


def _told(products: int) -> str:
    return _EMITTED.format(products) if products else _IN_LIBRARIES


def emitting(options: dict[str, Any] | None, products: int) -> dict[str, Any]:
    """Options with which XLA:GPU emits the smaller products itself, see `Pending`."""
    if products == 0:
        return (options or {}) | {"xla_gpu_enable_triton_gemm": False}
    disabled = (options or {}).get("xla_disable_hlo_passes", "")
    return (options or {}) | {
        "xla_gpu_gemm_rewrite_size_threshold": 2**products,
        # padding for cuBLAS would make the products larger
        "xla_disable_hlo_passes": f"{disabled},cublas-pad-for-gemms".lstrip(","),
    }
