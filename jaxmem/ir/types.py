"""What a jaxpr is made of, by the names of `jax.extend.core`, for annotations.

JAX annotates less than is true of what it traces (the type of a `Var` has no shape
there), and has one class for open and closed jaxprs from 0.12 on. So these are the
attributes that are read here, and no classes: nothing is an instance of them.
"""

from typing import Any, Protocol, TypeAlias


class Atom(Protocol):
    """What an equation reads: a variable, or a literal, which has a `val` besides."""

    @property
    def aval(self) -> Any:
        """Its type: shape, dtype, sharding, memory."""


class Var(Atom, Protocol):
    """What an equation makes, or what a jaxpr is given."""


class JaxprEqn(Protocol):
    """One operation of a jaxpr."""

    @property
    def primitive(self) -> Any:
        """What it does; `ir.primitives.of` has the record."""

    @property
    def invars(self) -> Any:
        """The atoms that it reads."""

    @property
    def outvars(self) -> Any:
        """The variables that it makes."""

    @property
    def params(self) -> Any:
        """What it does in particular, the jaxprs inside of it included."""


class Jaxpr(Protocol):
    """A list of equations, open or closed."""

    @property
    def constvars(self) -> Any:
        """The variables of what it closes over."""

    @property
    def invars(self) -> Any:
        """The variables of its arguments."""

    @property
    def outvars(self) -> Any:
        """The atoms that it gives."""

    @property
    def eqns(self) -> Any:
        """Its equations, in the order in which they are done."""


# A checker sees no attribute of jax's own class: `property(lambda ...)` makes them.
ClosedJaxpr: TypeAlias = Any
Body: TypeAlias = Any  # a jaxpr, open or closed
