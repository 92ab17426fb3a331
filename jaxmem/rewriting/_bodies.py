"""An equation evaluated with its bodies (of `scan`, `cond`, ...) run another way."""

from collections.abc import Callable, Sequence
from typing import Any

from jaxmem import _compat
from jaxmem.ir import jaxprs as _jaxpr
from jaxmem.ir import primitives


def with_bodies(eqn: Any, args: Sequence[Any], runs: Sequence[Callable]) -> list[Any]:
    """The outputs of `eqn`; in place of each of its bodies `runs` has a function."""
    if primitives.is_shard_map(eqn):  # its body knows the mesh: traced inside it
        return _compat.shard_map_again(eqn, runs[0], args)
    bodies = zip(_jaxpr.bodies(eqn), runs, strict=True)
    return _jaxpr.rebind(eqn, args, [_jaxpr.retrace(b, run) for b, run in bodies])
