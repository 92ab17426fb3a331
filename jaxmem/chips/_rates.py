"""What a chip reaches of its rates: the price of compiled steps, and of equations.

`_table.py` has what data sheets say. A constant here says where it comes from: "data
sheet"; "measured", by `benchmarks.time` on an H200 with jax 0.11.2, and taken for the
other GPUs; "published", measured by others on such a chip; "XLA's own cycles", what
XLA's cost model for TPUs says in the text of compiled steps (`benchmarks.time`);
"estimate", until a device has been timed.
"""

import functools
import math
from dataclasses import dataclass

from jaxmem.chips._table import CHIPS, Chip, Cpu, Gpu, Tpu


@dataclass(frozen=True)
class Rates:
    """Rates that a compiled step can reach.

    Attributes:
        chip: whose they are, a name of `jaxmem.targets()`.
        clock: cycles per second.
        narrow: flops per second of large products in 16 bits; in 8 bits twice that.
        wide: of those in 32 bits.
        bandwidth: bytes per second of the chip's memory.
        cached: bytes per second of values that are still in the cache.
        cache_bytes: of the cache, 0 for none.
        floating: elementwise instructions per second, one an element.
        integer: of these on integers.
        special: exponentials, roots and reciprocals per second.
        shifts: of integers per second; a GPU's are parts of rotations.
        vector: bytes per second that a TPU's vector unit loads and stores, wherever
            they lie.
        packing: elements of masks per second that are packed into bits and unpacked;
            a GPU does both where it makes and reads them.
        window: elements that an operation by itself, which is in no fusion, takes for
            each launch.
        launch: seconds of a kernel beside what it does, with the gap to the next.
        branch: seconds until it is known which branch of a conditional is taken.
        few: numbers up to which an operation by itself is no kernel.
        exposed: share of a kernel's shorter waits that the longest one does not hide.
        fill: seconds from a kernel's start to where its products, sums or tiles begin,
            and from there to its end.
        blocks: of threads that the chip starts per second.
        sectors: bytes per second of elements that are read or written one by one, each
            in a sector of its own.
        near: of these where the other elements of a sector are soon wanted, too.
        issue: seconds of one load of 1024 threads, where the next are on their way.
        wait: seconds of one load where nothing else is.
        between: share of the products' rate that a kernel reaches which has
            exponentials between its products.
        host: bytes per second to and from the host's memory.
        link: bytes per second to other chips; of a TPU along one axis of its torus.
        axes: of that torus; one for a GPU, whose links go to a switch.
        ring: devices from which an axis closes to a ring.
        hop: seconds that a collective takes beside its bytes, for each device.
        processors: how many tiles of a product run at once; of a TPU's core the
            matrix units, which share the sums of a product.
        tiles: sides of the tiles of products that the libraries have; of a TPU the
            side of its matrix unit.
    """

    chip: str
    clock: float
    narrow: float
    wide: float
    bandwidth: float
    cached: float
    cache_bytes: int
    floating: float
    integer: float
    special: float
    shifts: float
    vector: float
    packing: float
    window: float
    launch: float
    branch: float
    few: int
    exposed: float
    fill: float
    blocks: float
    sectors: float
    near: float
    issue: float
    wait: float
    between: float
    host: float
    link: float
    axes: int
    ring: int
    hop: float
    processors: int
    tiles: tuple[tuple[int, int], ...]

    @property
    def draws_in_readers(self) -> bool:
        """Whether random bits are drawn in whatever reads them, as XLA for TPU does."""
        return math.isfinite(self.packing)


# Shares of the data sheet's figures.
_GPU_PRODUCTS = 0.84  # measured: cuBLAS, large products in bfloat16
_GPU_BANDWIDTH = 0.88  # measured: sums and sums of rows, large ones
_GPU_BETWEEN = 0.4  # measured: our attention's kernels, 0.31 to 0.47
_ISSUED = 0.75  # measured: threefry, erf and other long formulas
_TPU_PRODUCTS = 1.0  # XLA's own cycles: large products
_TPU_EXPOSED = 0.4  # XLA's own cycles: products with bytes, or arithmetic, as long
_TPU_BETWEEN = 0.5  # estimate: heads of 64 fill half a matrix unit
_LINK = 0.8  # published: NCCL's bus bandwidth of large messages
_HOST = 0.8  # published: pinned copies over PCI Express
# Seconds.
_GPU_BRANCH = 1e-5  # estimate: a number goes to the host, which then goes on
_GPU_FILL = 1e-6  # measured: products and sums of rows of 10 us
_HOP = 4e-6  # published: NCCL's latency of a step of a ring over NVLink
_TPU_HOP = 1e-6  # estimate
# Of a GPU's processor, in cycles of its clock.
_CACHED = 20  # bytes from the L2 cache; measured: kernels on 10 to 40 MB
_BLOCK = 160  # from the start of a block of threads to the next; measured: broadcasts
_SECTORS = 11  # bytes of sectors, of which one element is wanted; measured: transposed
_NEAR = 26  # the same where the next blocks find them in the L1 cache; measured
_ISSUE = 180  # of one load of 1024 threads among others; measured: sums of columns
_WAIT = 400  # of one load by itself; measured: sums of columns that write as they go
_GPU_TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64))
# Of a TPU: clock in GHz, side and number of matrix units of a device (data sheets; the
# clock follows from the peak and the units); bytes a cycle that a core loads and
# stores, and share of the bandwidth (XLA's own cycles: operations without products,
# products that move more; estimate: v4 and v5p as v5e)
_TPUS = {
    "v4": (1.05, 128, 8, 256, 0.7),
    "v5e": (1.5, 128, 4, 256, 0.7),
    "v5p": (1.75, 128, 8, 256, 0.7),
    "v6e": (1.75, 256, 4, 600, 0.95),
}
_RINGS = {2: 16, 3: 4}  # axes of a torus -> devices of one that closes; data sheets
_LANES = 8 * 128  # of a vector unit
_SLOTS = 4  # vector instructions a cycle; XLA's own cycles: threefry
_TPU_PACKED = 18  # bytes loaded and stored for an element of a mask, which is also made
# a second time, and copied; XLA's own cycles: dropout of attention
_TPU_WINDOW = 2**17  # elements; XLA's own cycles: conversions, broadcasts


def is_timed(target: str) -> bool:
    """Whether seconds are predicted of steps compiled for a chip: not of a CPU's."""
    return target in CHIPS and not isinstance(CHIPS[target].compiler, Cpu)


@functools.cache
def rates_of(target: str) -> Rates:
    """The rates of a chip of `jaxmem.targets()`; of a CPU they only rank operations."""
    chip = CHIPS[target]
    if isinstance(chip.compiler, Gpu):
        return _of_gpu(target, chip, chip.compiler)
    if isinstance(chip.compiler, Tpu):
        return _of_tpu(target, chip, chip.compiler)
    return _of_cpu(target, chip)


def _of_gpu(name: str, chip: Chip, gpu: Gpu) -> Rates:
    clock, machine = gpu.clock_ghz * 1e9, chip.machine
    lanes = gpu.cores * gpu.fpus_per_core * clock
    return Rates(
        chip=name,
        clock=clock,
        narrow=_GPU_PRODUCTS * machine.narrow,
        wide=_GPU_PRODUCTS * machine.wide,
        bandwidth=_GPU_BANDWIDTH * machine.bandwidth,
        cached=_CACHED * gpu.cores * clock,
        cache_bytes=gpu.l2_bytes,
        floating=_ISSUED * lanes,
        integer=_ISSUED * lanes,
        special=gpu.cores * 16 * clock,  # data sheet: 16 a cycle
        shifts=math.inf,
        vector=math.inf,
        packing=math.inf,
        window=math.inf,
        launch=machine.launch,
        branch=_GPU_BRANCH,
        few=-1,
        exposed=0.0,
        fill=_GPU_FILL,
        blocks=gpu.cores * clock / _BLOCK,
        sectors=gpu.cores * clock * _SECTORS,
        near=gpu.cores * clock * _NEAR,
        issue=_ISSUE / clock,
        wait=_WAIT / clock,
        between=_GPU_BETWEEN,
        host=_HOST * machine.host,
        link=_LINK * machine.link,
        axes=1,
        ring=1,
        hop=_HOP,
        processors=gpu.cores,
        tiles=_GPU_TILES,
    )


def _of_tpu(name: str, chip: Chip, tpu: Tpu) -> Rates:
    ghz, side, units, loaded, share = _TPUS[tpu.name]
    machine, clock = chip.machine, ghz * 1e9
    axes = len(tpu.slices[0].split("x"))
    vector = tpu.cores * _LANES * clock
    return Rates(
        chip=name,
        clock=clock,
        narrow=_TPU_PRODUCTS * machine.narrow,
        wide=_TPU_PRODUCTS * machine.wide,
        bandwidth=share * machine.bandwidth,
        cached=share * machine.bandwidth,
        cache_bytes=0,  # what stays in vector memory is marked in the module's text
        floating=_SLOTS * vector,
        integer=_SLOTS * vector,
        special=vector,
        shifts=_SLOTS * vector,
        vector=loaded * tpu.cores * clock,
        packing=loaded * tpu.cores * clock / _TPU_PACKED,
        window=_TPU_WINDOW,
        launch=machine.launch,
        branch=machine.launch,
        few=_LANES,  # XLA's own cycles: it counts few of these
        exposed=_TPU_EXPOSED,
        fill=0.0,
        blocks=math.inf,  # a TPU's compiler lays out loads itself
        sectors=math.inf,
        near=math.inf,
        issue=0.0,
        wait=0.0,
        between=_TPU_BETWEEN,
        host=_HOST * machine.host,
        link=_LINK * machine.link,
        axes=axes,
        ring=_RINGS[axes],
        hop=_TPU_HOP,
        processors=units // tpu.cores,
        tiles=((side, side),),
    )


def _of_cpu(name: str, chip: Chip) -> Rates:
    """Products, bytes and copies by the table; nothing else is asked of a CPU."""
    machine = chip.machine
    return Rates(
        chip=name,
        clock=math.inf,
        narrow=machine.narrow,
        wide=machine.wide,
        bandwidth=machine.bandwidth,
        cached=machine.bandwidth,
        cache_bytes=0,
        floating=math.inf,
        integer=math.inf,
        special=math.inf,
        shifts=math.inf,
        vector=math.inf,
        packing=math.inf,
        window=math.inf,
        launch=machine.launch,
        branch=machine.launch,
        few=-1,
        exposed=0.0,
        fill=0.0,
        blocks=math.inf,
        sectors=math.inf,
        near=math.inf,
        issue=0.0,
        wait=0.0,
        between=1.0,
        host=machine.host,
        link=machine.link,
        axes=1,
        ring=1,
        hop=0.0,
        processors=1,
        tiles=((1, 1),),
    )
