"""Which outputs of a jaxpr take the memory of which donated inputs."""

import collections
from collections.abc import Iterable, Mapping
from typing import Any

Aliases = Mapping[int, int]  # position of an output -> of the input in its memory


def by_shape(closed, inputs: Iterable[int]) -> Aliases:
    """Output -> input in whose memory it will be: the first of its kind, as in jit."""
    free: dict[Any, collections.deque[int]] = collections.defaultdict(collections.deque)
    for i in inputs:
        aval = closed.in_avals[i]
        free[aval.shape, aval.dtype].append(i)
    found = {}
    for o, aval in enumerate(closed.out_avals):
        if queue := free.get((aval.shape, aval.dtype)):
            found[o] = queue.popleft()
    return found
