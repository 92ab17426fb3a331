"""One colour a module, the same in every picture of a result."""

from collections.abc import Iterable

REST = "#8a8f98"  # of the modules that have no colour of their own
# Arguments and outputs are always there: they are grey, and coloured is what could be
# saved.
FIXED = {
    "(arguments)": "#b8bec7",
    "(outputs)": "#d8dce2",
    "(others)": REST,
    "(fragmentation)": REST,
}
_COLOURS = (
    "#4269d0 #efb118 #ff725c #6cc5b0 #3ca951 #ff8ab7 #a463f2 #97bbf5 #9c6b4e #2f8f9d"
).split()


def colours_of(modules: Iterable[str]) -> dict[str, str]:
    """A colour for each module, the first ten of which have one of their own."""
    own = [m for m in dict.fromkeys(modules) if m not in FIXED]
    chosen = dict(zip(own, _COLOURS, strict=False))
    return FIXED | dict.fromkeys(own, REST) | chosen
