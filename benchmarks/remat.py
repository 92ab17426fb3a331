"""Recomputation on plain graphs: batch in 16 GB, cost against the exact, planning time.

    python -m benchmarks.remat checkmate
    python -m benchmarks.remat exact
    python -m benchmarks.remat transformer

`checkmate`: the largest batch that fits 16 GB (16e9 bytes) with at most one forward
pass recomputed, as in Checkmate's table (https://arxiv.org/abs/1910.02653, section 6.4,
and its public artifact), for its heuristics and for `frontier`. Counted are the layers'
outputs and their gradients, see `remat_models`, and off go the bytes of the parameters
and of their gradients. All activations grow with the batch, so one plan at batch 1
gives the largest.

The artifact takes the parameters off twice where it measures keeping all and Chen's
heuristics (VGG19: 167, 197, 266), but once for its own solver (289), so those figures
do not compare: here are both. "keep all" there means that every layer's output stays to
the last gradient; "as written" is the same order with nothing kept that is not read.
Chen's heuristics take the layers one after another, whatever skips there are.

`exact`: cost over that of the mixed-integer program, where it proves its optimum.

`transformer`: seconds of planning against the number of operations.
"""

import dataclasses
import math
import sys
from collections.abc import Iterable

import numpy as np

from benchmarks._common import publish
from benchmarks.models.graphs import (
    Layer,
    Network,
    mobilenet,
    resnet50,
    training_graph,
    transformer,
    unet,
    vgg,
)
from jaxmem import planning
from jaxmem.planning import Graph

MEMORY = 16e9
PARTS = (0.02, 0.2, 0.4, 0.6, 0.8)  # of the way from the least peak to the plain one
NETWORKS = {
    "VGG19": (vgg, 289),
    "MobileNet": (mobilenet, 1105),
    "ResNet50": (resnet50, 193),
    "U-Net": (unet, 57),
}
flops = lambda operation: operation.flops


def checkmate() -> None:
    rows = []
    for name, (build, threshold) in NETWORKS.items():
        network = build()
        layers = network.ordered()
        graph = training_graph(layers)
        found = planning.frontier(graph, cost=flops)
        forward = sum(layer.flops for layer in layers)
        k = next(k for k, cost in enumerate(found.costs) if cost <= forward)
        peaks = {
            "keep all": kept_to_the_end(graph, range(len(layers)))[0],
            "Chen, square root": square_root(graph, len(layers))[0],
            "Chen, greedy": greedy(graph, len(layers), forward)[0],
            "as written": planning.peak(graph),
            "frontier": found.peaks[k],
            "least for an operation": found.lower_bound,
        }
        for how, peak in peaks.items():
            mine = how == "frontier"
            rows.append(
                (
                    name,
                    how,
                    peak / 1e6,
                    int(largest(network, peak, 2)),
                    int(largest(network, peak, 1)),
                    threshold if mine else "",
                    f"{found.costs[k] / forward:.3f}" if mine else "",
                    f"{found.seconds:.1f}" if mine else "",
                )
            )
    columns = (
        "network",
        "strategy",
        "MB an image",
        "batch, parameters off twice",
        "batch, off once",
        "threshold, off once",
        "forward passes recomputed",
        "seconds",
    )
    publish("remat-checkmate", columns, rows)


def largest(network: Network, peak: int, times: int) -> float:
    """The batch that fits: `times` the parameters and their gradients come off."""
    return (MEMORY - times * 2 * 4 * network.parameters) / peak


def square_root(graph: Graph, layers: int) -> tuple[int, float]:
    """Chen's sqrt(n): every so many of the layers is kept.

    Source: Chen et al. (https://arxiv.org/abs/1604.06174), section 3.
    """
    step = int(math.sqrt(layers))
    return kept_to_the_end(graph, [i for i in range(layers) if (i + 1) % step == 0])


def greedy(graph: Graph, layers: int, forward: float) -> tuple[int, float]:
    """Chen's greedy: a layer is kept where the bytes since the last one exceed a size.

    The size is swept in twentieths of the peak of `square_root`, up to twice that.

    Source: Chen et al. (https://arxiv.org/abs/1604.06174), algorithm 3.
    """
    found = [kept_to_the_end(graph, range(layers))]
    for limit in square_root(graph, layers)[0] * np.arange(0, 2, 0.05):
        kept, since = [], 0
        for i in range(layers):
            since += graph.values[i].bytes
            if since > limit:
                kept.append(i)
                since = 0
        found.append(kept_to_the_end(graph, kept))
    return min(peak_and_cost for peak_and_cost in found if peak_and_cost[1] <= forward)


def kept_to_the_end(graph: Graph, kept: Iterable[int]) -> tuple[int, float]:
    """Peak and recomputed flops when these layers are kept, as the artifact counts.

    A kept layer stays to the last gradient but one. The others of a segment, from one
    kept layer to the next, stay together: till the segment's end in the forward pass,
    and in the backward pass, with the segment's gradients, from when they are done
    again, all at once, to its last gradient but one. That they stay is written into the
    graph as reads.
    """
    layers, last = len(graph.operations) // 2, len(graph.operations) - 1
    kept = list(kept)
    reads = {last - 1: list(kept)}
    borders = [0, *kept, layers]
    segments = [
        [i for i in range(a, b) if i not in kept]
        for a, b in zip(borders, borders[1:], strict=False)
    ]
    sequence = list(range(layers + 1))
    for a, b, inner in zip(borders, borders[1:], segments, strict=False):
        # Read one operation early: what is not needed goes before the last one runs.
        reads.setdefault(b, []).extend(inner)
        end = max(last - a - 1, last - b + 1)
        reads.setdefault(end, []).extend(inner)
        reads[end].extend(last - i for i in range(a + 2, min(b, layers)))
    for a, b, inner in reversed(
        list(zip(borders, borders[1:], segments, strict=False))
    ):
        sequence += inner if b < layers else []
        first = layers + 1 if b == layers else last - b + 1
        sequence += range(first, last - a + 1)
    longer = dataclasses.replace(
        graph,
        operations=tuple(
            dataclasses.replace(o, inputs=(*o.inputs, *reads.get(i, ())))
            for i, o in enumerate(graph.operations)
        ),
    )
    cost = sum(graph.operations[i].flops for i in sequence)
    once = sum(o.flops for o in graph.operations)
    return max(planning.sequence_profile(longer, sequence)), cost - once


def exact() -> None:
    rows = []
    for name, graph in small_graphs().items():
        found = planning.frontier(graph, cost=flops)
        worst, solved, spent = 0.0, 0, 0.0
        least, top = found.peaks[0], found.peaks[-1]
        for part in PARTS:
            budget = least + part * (top - least)
            best = planning.rematerialise(
                graph, budget, cost=flops, exact=True, effort=0, time_limit=60.0
            )
            spent += best.seconds
            if best.optimal:
                solved += 1
                more = found.at(budget).cost - best.cost
                worst = max(worst, more / best.cost if more > 0 else 0.0)
        count = len(graph.operations)
        row = (name, count, solved, 100 * worst, found.seconds, spent / len(PARTS))
        rows.append(row)
        print(row)
    columns = (
        "graph",
        "operations",
        "budgets solved of 5",
        "most over exact %",
        "seconds, every budget",
        "seconds, exact, one budget",
    )
    publish("remat-exact", columns, rows)


def small_graphs() -> dict[str, Graph]:
    graphs = {"chain of 10": _chain([(32, 1.0)] * 10)}
    for seed in range(3):
        random = np.random.default_rng(seed)
        layers = zip(random.integers(1, 40, 9), random.integers(1, 20, 9), strict=True)
        graphs[f"chain of 9, random {seed}"] = _chain([(int(s), c) for s, c in layers])
    graphs["U-Net of 3 levels"] = _small_unet(3)
    graphs["VGG19's first stages"] = training_graph(vgg().ordered()[:9])
    graphs["VGG with norms"] = _with_norms()
    return graphs


def _with_norms() -> Graph:
    net, at = Network((64, 64, 3)), -1
    for width in (16, 32, 32):
        at = net.relu(net.norm(net.conv(at, width)))
        at = net.pool(at) if width == 16 else at
    net.dense(net.mean(at), 10)
    return training_graph(net.ordered())


def _chain(layers: list[tuple[int, float]]) -> Graph:
    return training_graph(
        [
            Layer("layer", (i - 1,) if i else (), (size,), float(cost))
            for i, (size, cost) in enumerate(layers)
        ]
    )


def _small_unet(levels: int) -> Graph:
    """Two layers a level, halved going down, with skips going up."""
    net, at, skips = Network((64, 64, 4)), -1, []
    for level in range(levels):
        at = net.conv(net.conv(at, 8 << level), 8 << level)
        skips.append(at)
        at = net.pool(at) if level + 1 < levels else at
    for level in reversed(range(levels - 1)):
        at = net.joined(net.up(at), skips[level])
        at = net.conv(at, 8 << level)
    return training_graph(net.ordered())


def transformers() -> None:
    rows = []
    for blocks in (6, 12, 24, 50):
        graph = transformer(blocks)
        found = planning.frontier(graph)
        top = found.peaks[-1]
        cost = planning.seconds()
        step = sum(cost(o) for o in graph.operations)
        half, fifth = (found.at(top * part).cost / step for part in (0.5, 0.2))
        rows.append(
            (
                blocks,
                len(graph.operations),
                found.seconds,
                top / 2**30,
                found.peaks[0] / 2**30,
                found.lower_bound / 2**30,
                100 * half,
                100 * fifth,
            )
        )
    columns = (
        "blocks",
        "operations",
        "seconds",
        "plain GiB",
        "least GiB",
        "bound GiB",
        "% more at a half",
        "% more at a fifth",
    )
    publish("remat-transformer", columns, rows)


if __name__ == "__main__":
    parts = {"checkmate": checkmate, "exact": exact, "transformer": transformers}
    for part in sys.argv[1:] or parts:
        parts[part]()
