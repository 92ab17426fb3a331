"""What is known of a primitive: the fields that somebody asks for, and no others."""

import enum
from dataclasses import dataclass

FIRST, ALL = slice(1), slice(None)


class PrimitiveKind(enum.Enum):
    """What a primitive does; each has one kind, the facts beside it are its fields."""

    ELEMENTWISE = "each element of the result of those at its place"
    SPECIAL = "the same, by a series or a loop: it is not done where it is read"
    CAST = "the elements, rounded or in another dtype"
    IDENTITY = "the array as it is: its name, its sharding, its type among devices"
    BARRIER = "the arrays as they are, which XLA may not move code across"
    SHAPE = "all elements of one array, in another shape or order"
    MOVE = "elements of arrays at other places"
    CREATION = "an array of no array"
    GATHER = "elements at places that are computed"
    SCATTER = "an array with other elements at places that are computed"
    UPDATE = "an array with a block of others"
    PRODUCT = "a product of matrices or a convolution"
    REDUCTION = "one element of all along axes"
    CUMULATIVE = "each element of those before it along an axis"
    WINDOW = "one element of each window, and what its derivative is"
    SORT = "the elements of an axis in the order of their values"
    MATRIX = "a decomposition of matrices, or a solve"
    TRANSFORM = "a Fourier transform"
    RANDOM = "random bits of a key"
    KEY = "keys of keys"
    PSUM = "a sum over devices"
    COLLECTIVE = "what devices send each other"
    TRANSFER = "an array in another memory"
    JIT = "a call of a jitted function"
    CALL = "a call of a body"
    CUSTOM_JVP = "a call with a rule for its derivative, in forward mode"
    CUSTOM_VJP = "a call with a rule for its derivative, in reverse mode"
    REMAT = "a call that is recomputed in the backward pass"
    LOOP = "a loop"
    BRANCH = "one of several bodies"
    SOLVE = "a solve by bodies"
    SHARD_MAP = "a body that each device runs on its part"
    KERNEL = "a program that is written for a chip"
    CALLBACK = "a call of Python"
    PRINT = "a call of Python that gives nothing back"
    STATE = "an array that is written in place"
    CUSTOM = "nothing is known of it"


_CALLS = (
    PrimitiveKind.JIT,
    PrimitiveKind.CALL,
    PrimitiveKind.CUSTOM_JVP,
    PrimitiveKind.CUSTOM_VJP,
    PrimitiveKind.REMAT,
)
_MIXES = PrimitiveKind.REDUCTION, PrimitiveKind.CUMULATIVE, PrimitiveKind.SORT
_HEAVY = PrimitiveKind.PRODUCT, PrimitiveKind.MATRIX, PrimitiveKind.SORT


@dataclass(frozen=True, eq=False, slots=True)
class PrimitiveRecord:
    """The facts about one primitive.

    Attributes:
      name: as `eqn.primitive.name` is.
      kind: what it does.
      elementwise: each element of its result is made of those at its place.
      moves: it moves or casts one array, and does nothing else.
      view: XLA makes no kernel of it: the result has the bytes of the operand.
      fused: it costs very little where it is read, and is done there.
      fusible: XLA may compute it where it is read, if that pays.
      into_first: it writes into its first operand, whose memory the result takes.
      operations: work for each element that it makes in a kernel, in terms of an
        addition.
      linear: the operands that it is linear in, taken together.
      bilinear: it is linear in each of two operands; its derivative needs the other.
      keeps_zero: the result is zero where the first operand is, or for sums of it.
      exact: it rounds nothing.
      sums: it adds up or multiplies terms, and rounds at each.
      combine: the function of `lax` that combines its results of parts, if one does.
      commutes: its two operands may change places.
      orders: its result says whether one operand is larger than the other.
      saves_operand: its derivative reads the operand as it is.
      in_chlo: it is lowered to CHLO, where Shardy follows no array.
      by_body: it has a body that says how it combines two elements.
      opaque: what it costs cannot be told from the jaxpr.
    """

    name: str
    kind: PrimitiveKind
    elementwise: bool = False
    moves: bool = False
    view: bool = False
    fused: bool = False
    fusible: bool = False
    into_first: bool = False
    operations: float = 0.25
    linear: slice | None = None
    bilinear: bool = False
    keeps_zero: bool = False
    exact: bool = False
    sums: bool = False
    combine: str = ""
    commutes: bool = False
    orders: bool = False
    saves_operand: bool = False
    in_chlo: bool = False
    by_body: bool = False
    opaque: bool = False

    @property
    def same(self) -> bool:
        """Whether the results are the operands, one each."""
        return self.kind is PrimitiveKind.IDENTITY or self.kind is PrimitiveKind.BARRIER

    @property
    def keeps_all(self) -> bool:
        """Whether the result has all elements of one array, cast or in another shape.

        What has a meaning of its own (a name, a barrier, a sharding) does not count.
        """
        return self.moves and self.kind is not PrimitiveKind.MOVE

    @property
    def rearranges(self) -> bool:
        """The same, and the result has the type among devices that the operand has."""
        return self.keeps_all and (self.elementwise or self.kind is PrimitiveKind.SHAPE)

    @property
    def shows(self) -> bool:
        """Whether its results are its operands, one each, perhaps in another shape.

        They may be cast, or rounded.
        """
        return self.same or self.keeps_all or self.name == "reduce_precision"

    @property
    def cheap(self) -> bool:
        """Whether any part of its result can be made of parts for very little."""
        return self.elementwise or self.keeps_all or self.name == "iota"

    @property
    def calls(self) -> bool:
        """Whether it calls one body, with its operands."""
        return self.kind in _CALLS

    @property
    def mixes(self) -> bool:
        """Whether, along its axis, each element is made of many of the operand's."""
        return self.kind in _MIXES

    @property
    def sends(self) -> bool:
        """Whether devices send each other something."""
        return self.kind is PrimitiveKind.COLLECTIVE or self.kind is PrimitiveKind.PSUM

    @property
    def heavy(self) -> bool:
        """Whether it costs as much as a product of matrices."""
        return self.kind in _HEAVY
