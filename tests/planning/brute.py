"""The optimum by trying every order."""

from jaxmem.planning import Graph
from jaxmem.planning._liveness import Walk


def orders(graph: Graph):
    """Every order of the operations; for about eight of them."""

    def rest(done: tuple[int, ...]):
        if len(done) == len(graph.operations):
            yield done
        for i, before in enumerate(graph.before):
            if i not in done and all(b in done for b in before):
                yield from rest((*done, i))

    return rest(())


def least(graph: Graph) -> int:
    """The lowest peak of any order."""

    def peak(order: tuple[int, ...]) -> int:
        walk = Walk(graph)
        return max(map(walk.do, order), default=0)

    return min(map(peak, orders(graph)))
