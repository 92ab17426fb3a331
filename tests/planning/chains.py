"""Chains with a backward pass, and the dynamic program for them in units of memory.

Source: Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova, "Optimal checkpointing for
heterogeneous chains" (https://arxiv.org/abs/1911.13214), section 4.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from benchmarks.models.graphs import Layer, training_graph
from jaxmem.planning import Graph, Operation, Value


@dataclass(frozen=True)
class Chain:
    """n stages, each of which reads what the one before makes.

    Attributes:
      out: (n + 1,) bytes that enter the first stage, and that each stage passes on; its
        gradient has as many.
      inner: (n,) bytes that a stage makes for its backward pass alone.
      cost: (n,) of each stage.
    """

    out: np.ndarray
    inner: np.ndarray
    cost: np.ndarray

    def graph(self) -> Graph:
        count, values = len(self.cost), [Value(int(b)) for b in self.out]
        inner = range(len(values), len(values) + count)
        values += [Value(int(b)) for b in self.inner]
        gradient = len(values)
        values += [Value(int(b)) for b in self.out]
        operations = [Operation("input", (), (0,), recomputable=False)]
        for k, flops in enumerate(self.cost):
            made = (k + 1, inner[k])
            operations.append(Operation("forward", (k,), made, flops=float(flops)))
        operations.append(Operation("loss", (count,), (gradient + count,)))
        for k in reversed(range(count)):
            reads = (k, k + 1, inner[k], gradient + k + 1)
            operations.append(Operation("backward", reads, (gradient + k,)))
        return Graph(tuple(operations), tuple(values), (), (gradient,))


def random_chain(count: int, seed: int, inner: int) -> Chain:
    """A chain of stages of 1 to 10 bytes, with as many as `inner` beside them."""
    random = np.random.default_rng(seed)
    return Chain(
        random.integers(1, 10, count + 1),
        random.integers(0, inner + 1, count),
        random.integers(1, 20, count),
    )


def layered(layers: Iterable[tuple[int, float]]) -> Graph:
    """A training step of layers (bytes / 4, cost) one after another."""
    return training_graph(
        [
            Layer("layer", (i - 1,) if i else (), (size,), float(cost))
            for i, (size, cost) in enumerate(layers)
        ]
    )


def persistent(chain: Chain) -> np.ndarray:
    """The least cost of what is recomputed, by bytes; infinite below what it takes.

    Over schedules whose checkpoints stay until their own stage has gone backward.
    """
    out, inner, count = chain.out, chain.inner, len(chain.cost)
    memory = int(2 * out.sum() + inner.sum())
    before = np.concatenate([[0.0], np.cumsum(chain.cost)])
    # (i, j) -> cost of stages i to j - 1, forward and backward, beside their input.
    best: dict[tuple[int, int], np.ndarray] = {}
    for length in range(1, count + 1):
        for i in range(count - length + 1):
            best[i, i + length] = _run(chain, best, before, i, i + length, memory)
    whole = np.full(memory + int(out[0]), np.inf)
    whole[out[0] :] = best[0, count]
    return whole - before[-1]


def _run(chain, best, before, i: int, j: int, memory: int) -> np.ndarray:
    out, inner = chain.out, chain.inner
    kept = out[i + 1] + inner[i]
    if j == i + 1:
        found = np.full(memory, np.inf)
        found[kept + out[j] + out[i] :] = chain.cost[i]
        return found
    rest = out[j] if j < len(chain.cost) else 0  # its gradient waits
    found = _beside(best[i + 1, j], kept) + chain.cost[i]
    found[: max(kept + rest, kept + out[i] + out[i + 1])] = np.inf
    sweep = 0
    for s in range(i + 1, j):
        reads = out[s - 1] if s - 1 > i else 0
        sweep = max(sweep, reads + out[s] + inner[s - 1] + rest)
        cost = _beside(best[s, j], out[s]) + best[i, s] + (before[s] - before[i])
        cost[:sweep] = np.inf
        np.minimum(found, cost, out=found)
    return found


def _beside(cost: np.ndarray, held: int) -> np.ndarray:
    """The cost where so many bytes are taken."""
    found = np.full(len(cost), np.inf)
    found[held:] = cost[: len(cost) - held]
    return found
