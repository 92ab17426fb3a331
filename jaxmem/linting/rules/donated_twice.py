"""One buffer in several arguments of which one is donated."""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import jax

from jaxmem.ir import jaxprs
from jaxmem.linting._arguments import about_arguments
from jaxmem.linting._subject import Finding, Subject


def donated_twice(subject: Subject) -> Iterator[Finding]:
    """Finds donations that fail when the step runs."""
    leaves_of: dict[Any, list[int]] = defaultdict(list)
    for i, leaf in enumerate(subject.leaves):
        if (buffer := _buffer(leaf)) is not None:
            leaves_of[buffer].append(i)
    for leaves in leaves_of.values():
        donated = [i for i in leaves if subject.call.leaves[i].donated]
        if len(leaves) > 1 and donated:
            twice = len(donated) > 1
            yield from about_arguments(
                subject,
                leaves,
                check="donated twice" if twice else "donated and read",
                severity="error",
                what=(
                    "one buffer is donated as several arguments"
                    if twice
                    else "one buffer is an argument that is donated and another that "
                    "is not"
                ),
                remedy="copy it (jnp.copy) for all arguments but one",
                least=0,  # the step fails, whatever the size
            )


def _buffer(leaf: Any) -> Any:
    """Equal for arguments with the same memory; None where there is no memory."""
    if not isinstance(leaf, jax.Array) or jaxprs.is_abstract(leaf):
        return None
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) or leaf.is_deleted():
        return id(leaf)
    try:
        return leaf.unsafe_buffer_pointer()
    except (ValueError, RuntimeError):  # an array on several devices has no pointer
        return id(leaf)
