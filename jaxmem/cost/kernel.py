"""What a kernel of a compiled module does, whatever the chip."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Product:
    """`batch` products of [m, k] by [k, n].

    Attributes:
        batch: how many.
        m: rows of the result.
        n: columns of the result.
        k: the axis that is summed over.
        bits: of an element of the wider operand.
        dtype: XLA's name of that operand's type.
        library: whether cuBLAS or cuDNN does it.
        spent: its time over that of a product by itself.
        again: whether a library does it a second time, inside of another call.
    """

    batch: int
    m: int
    n: int
    k: float  # of a convolution the mean number of its taps inside of the input
    bits: int
    dtype: str
    library: bool = False
    spent: float = 1.0
    again: bool = False

    @property
    def flops(self) -> float:
        """Multiplications and additions."""
        return 2.0 * self.batch * self.m * self.n * self.k


@dataclass(frozen=True)
class Traffic:
    """Bytes of a kernel in the memory of the chip, and in that of the host.

    Attributes:
        reads: (name of the operand, bytes) pairs.
        written: bytes.
        host: bytes that cross to or from the host's memory.
        near: bytes read and written in a TPU's vector memory.
    """

    reads: tuple[tuple[str, int], ...]
    written: int
    host: int = 0
    near: int = 0

    @property
    def bytes(self) -> int:
        """Read and written."""
        return sum(size for _, size in self.reads) + self.written

    def at_most(self, size: int) -> "Traffic":
        """The same where a kernel moves no more than `size` bytes of its arrays."""
        share = min(1.0, size / max(1, self.bytes))
        reads = tuple((name, int(share * whole)) for name, whole in self.reads)
        return Traffic(reads, int(share * self.written), self.host, self.near)


@dataclass(frozen=True)
class Arithmetic:
    """Instructions of elementwise work, one an element.

    Attributes:
        floating: on floating-point numbers.
        integer: on integers.
        special: of the special function unit: exponentials, roots, reciprocals.
        shifts: of integers. Two of them and an `or` are one rotation of a GPU.
    """

    floating: float = 0.0
    integer: float = 0.0
    special: float = 0.0
    shifts: float = 0.0

    def __add__(self, other: "Arithmetic") -> "Arithmetic":
        return Arithmetic(
            self.floating + other.floating,
            self.integer + other.integer,
            self.special + other.special,
            self.shifts + other.shifts,
        )


@dataclass(frozen=True)
class Declared:
    """A kernel's cost, as its author says it.

    Attributes:
        flops: of its products.
        transcendentals: exponentials and the like.
        bytes: that it reads and writes; 0 where it does not say.
        bits: of an element of the largest operand.
    """

    flops: float = 0.0
    transcendentals: float = 0.0
    bytes: int = 0
    bits: int = 16


@dataclass(frozen=True)
class Access:
    """What a fusion's threads do to get at its bytes.

    Attributes:
        blocks: of threads that are started.
        scattered: bytes of sectors of which one element is wanted.
        near: bytes of such sectors whose other elements the block wants soon.
        rows: groups of rows that a block takes one after another.
        columns: blocks that do so.
        loads: of each row.
        stores: whether something is written for each row, before the next is read.
        phases: whether threads wait for one another before they write.
        serial: whether arithmetic waits for loads, as few blocks fit side by side.
        spilled: bytes of values that do not fit in registers.
        apart: bytes that other kernels of the same call move.
    """

    blocks: float = 0.0
    scattered: float = 0.0
    near: float = 0.0
    rows: int = 0
    columns: int = 0
    loads: float = 0.0
    stores: bool = False
    phases: bool = False
    serial: bool = False
    spilled: float = 0.0
    apart: float = 0.0


@dataclass(frozen=True)
class KernelWork:
    """What a kernel does, whatever the chip."""

    products: tuple[Product, ...]
    traffic: Traffic
    arithmetic: Arithmetic
    access: Access = Access()
    declared: Declared | None = None  # of a kernel whose author says what it costs
    loaded: int = 0  # bytes that a TPU's vector unit loads and stores
    alone: int = 0  # elements of an operation that is in no fusion

    @property
    def flops(self) -> float:
        """Of its products."""
        declared = self.declared.flops if self.declared else 0.0
        return declared + sum(one.flops for one in self.products)

    @property
    def repeated_flops(self) -> float:
        """Of the products that a library's call does a second time."""
        return sum(one.flops for one in self.products if one.again)
