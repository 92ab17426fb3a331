"""Formulas in a traced function, replaced by lean ops: for any framework.

`rewrite(fn)` traces `fn`, finds the formulas of `LIBRARY` in the jaxpr and evaluates it
with the lean op in their place. `find` tells what is there. A `Pattern` is an example:
a plain function, and the lean one that replaces it.

Only what is written in the traced function is seen; the inside of a `custom_vjp`
keeps its own rule, and a formula whose interior is used elsewhere is left and reported.
"""

from jaxmem.rewriting._auto import SaveChoice as SaveChoice
from jaxmem.rewriting._auto import auto_save as auto_save
from jaxmem.rewriting._codes import share_codes as share_codes
from jaxmem.rewriting._forward import KeptInside as KeptInside
from jaxmem.rewriting._forward import kept_inside as kept_inside
from jaxmem.rewriting._forward import with_losses as with_losses
from jaxmem.rewriting._library import LIBRARY as LIBRARY
from jaxmem.rewriting._library import library as library
from jaxmem.rewriting._pattern import Pattern as Pattern
from jaxmem.rewriting._rewrite import Report as Report
from jaxmem.rewriting._rewrite import Site as Site
from jaxmem.rewriting._rewrite import find as find
from jaxmem.rewriting._rewrite import rewrite as rewrite

__all__ = [
    "Pattern",
    "auto_save",
    "find",
    "library",
    "rewrite",
]
