"""Recomputation under a budget, against plain simulation and exhaustive search."""

import heapq
import itertools
import time

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from benchmarks.models.graphs import Layer, training_graph, transformer, vgg
from jaxmem import planning
from jaxmem.planning import Graph, Operation, Value, sequence_profile
from jaxmem.planning.remat.chain import chain_plans
from jaxmem.planning.remat.sequence import SequenceTables, repeatable, without_unread
from tests.planning.chains import layered as chain

flops = lambda operation: operation.flops


def skips(sizes):
    """A training step in which layer i is read once more by layer -i."""
    count = len(sizes)
    return training_graph(
        [
            Layer(
                "layer",
                tuple({i - 1, count - 1 - i} if i > count // 2 else {i - 1} - {-1}),
                (size,),
                1.0 + size % 3,
            )
            for i, size in enumerate(sizes)
        ]
    )


def simulated(graph, sequence):
    """Bytes while each operation runs, instance by instance: slow and plain."""
    instances = []  # [value, made, last used]
    current = {}
    for place, i in enumerate(sequence):
        operation = graph.operations[i]
        for v in operation.inputs:
            if v in current:
                current[v][2] = place
        for v in operation.outputs:
            current[v] = [v, place, place]
            instances.append(current[v])
    for v in graph.outputs:
        if v in current:
            current[v][2] = len(sequence)
    found = []
    for place, i in enumerate(sequence):
        operation = graph.operations[i]
        total = operation.scratch
        for v, made, last in instances:
            if v in graph.aliases:
                old = graph.aliases[v]
                reads = [
                    p
                    for p, j in enumerate(sequence)
                    if old in graph.operations[j].inputs
                ]
                last = max(reads, default=made)
                last = last if last > made else made - 1
            if made <= place <= last:
                total += graph.values[v].bytes
        taken = set()
        for v, u in sorted(
            operation.in_place,
            key=lambda p: -min(graph.values[p[0]].bytes, graph.values[p[1]].bytes),
        ):
            dies = any(w == u and last == place for w, _, last in instances)
            if not dies or v in graph.aliases or {("o", v), ("i", u)} & taken:
                continue
            taken |= {("o", v), ("i", u)}
            total -= min(graph.values[v].bytes, graph.values[u].bytes)
        found.append(total)
    return found


def cheapest(graph, budget):
    """ExhaustiveResult: shortest path over (operations done once, values alive)."""
    size = [v.bytes for v in graph.values]
    count = len(graph.operations)
    queue, done = [(0.0, 0, frozenset())], set()
    while queue:
        cost, first, alive = heapq.heappop(queue)
        if first == count and set(graph.outputs) <= alive:
            return cost
        if (first, alive) in done:
            continue
        done.add((first, alive))
        for v in alive:
            heapq.heappush(queue, (cost, first, alive - {v}))
        for i in range(min(first + 1, count)):
            operation = graph.operations[i]
            there = alive | set(operation.outputs)
            fits = sum(size[v] for v in there) <= budget
            if set(operation.inputs) <= alive and fits and there != alive:
                price = cost + (operation.flops if i < first else 0.0)
                heapq.heappush(queue, (price, max(first, i + 1), there))
    return np.inf


@st.composite
def graphs(draw, fewest=1, most=9):
    """Operations that read some of what is there, with all they may have."""
    count = draw(st.integers(fewest, most))
    byte = st.integers(0, 40)
    values = [Value(draw(byte)) for _ in range(2)]
    operations, aliases, made = [], {}, []
    for _ in range(count):
        there = list(range(len(values)))
        inputs = tuple(draw(st.lists(st.sampled_from(there), max_size=3)))
        outputs = []
        for _ in range(draw(st.integers(1, 2))):
            outputs.append(len(values))
            values.append(Value(draw(byte)))
        made += outputs
        pairs = [(v, u) for v in outputs for u in dict.fromkeys(inputs) if u > 1]
        operations.append(
            Operation(
                "operation",
                inputs,
                tuple(outputs),
                draw(st.integers(0, 9)),
                tuple(p for p in pairs if draw(st.booleans())),
                flops=float(draw(st.integers(1, 9))),
                recomputable=draw(st.integers(0, 5)) > 0,
            )
        )
    outputs = draw(st.lists(st.sampled_from(made), unique=True, max_size=3))
    for argument, v in enumerate(outputs[:2]):
        if not any(v in o.inputs for o in operations) and draw(st.booleans()):
            aliases[v] = argument
    return Graph(tuple(operations), tuple(values), (0, 1), tuple(outputs), aliases)


@st.composite
def graphs_and_sequences(draw):
    graph = draw(graphs())
    recomputable = [i for i, may in enumerate(repeatable(graph)) if may]
    sequence = list(range(len(graph.operations)))
    for _ in range(draw(st.integers(0, 6)) if recomputable else 0):
        i = draw(st.sampled_from(recomputable))
        sequence.insert(draw(st.integers(sequence.index(i) + 1, len(sequence))), i)
    return graph, sequence


@hypothesis.given(graphs_and_sequences())
@hypothesis.settings(max_examples=150, deadline=None)
def test_bytes_of_a_sequence_are_those_of_a_plain_simulation(case):
    graph, sequence = case
    assert sequence_profile(graph, sequence) == simulated(graph, sequence)


@hypothesis.given(graphs())
@hypothesis.settings(max_examples=60, deadline=None)
def test_a_sequence_without_repeats_has_the_bytes_of_an_order(graph):
    everything = range(len(graph.operations))
    assert sequence_profile(graph, everything) == planning.profile(graph)


def test_a_value_made_again_is_not_there_in_between():
    graph = chain([(10, 1), (1, 1), (1, 1)])
    # The first layer's output is read by the second layer and by its own gradient.
    assert sequence_profile(graph, [0, 1, 2, 3, 4, 5, 6]) == [
        *(40, 44, 48, 52, 56, 56, 88)
    ]
    assert sequence_profile(graph, [0, 1, 2, 3, 4, 5, 0, 6]) == [
        *(40, 44, 8, 12, 16, 16, 48, 88)
    ]


@pytest.mark.parametrize(
    "sequence, message",
    [
        ([0, 1, 2, 3, 5, 4], "operation 5 comes before 4"),
        ([0, 1, 2, 3, 4, 5], "operation 6 is missing"),
        ([0, 1, 2, 3, 4, 5, 7], r"sequence\[6\]: there is no operation 7"),
        ([0, 1, 0, 2, 3, 4, 5, 6], "operation 0 must not be repeated"),
    ],
)
def test_a_bad_sequence_is_refused(sequence, message):
    graph = chain([(1, 1)] * 3)
    operations = list(graph.operations)
    operations[0] = Operation("effect", (), (0,), recomputable=False)
    graph = Graph(tuple(operations), graph.values, (), graph.outputs)
    with pytest.raises(ValueError, match=message):
        sequence_profile(graph, sequence)


def test_unread_repeats_go():
    graph = chain([(1, 1)] * 3)
    found = without_unread(SequenceTables(graph), [0, 1, 2, 0, 3, 0, 4, 5, 6])
    assert found.tolist() == [0, 1, 2, 3, 0, 4, 5, 6]


@hypothesis.given(graphs(fewest=4, most=12))
@hypothesis.settings(max_examples=25, deadline=None)
def test_every_plan_keeps_its_word(graph):
    found = planning.frontier(graph, cost=flops, effort=0.001)
    once = sum(o.flops for o in graph.operations)
    may = repeatable(graph)
    assert list(found.peaks) == sorted(set(found.peaks))
    assert list(found.costs) == sorted(found.costs, reverse=True)
    for peak in found.peaks:
        plan = found.at(peak)
        assert max(simulated(graph, plan.sequence)) == plan.peak == peak
        assert sum(graph.operations[i].flops for i in plan.sequence) == pytest.approx(
            once + plan.cost
        )
        assert all(may[i] for i in plan.recomputed)
        assert len(plan.sequence) == len(graph.operations) + len(plan.recomputed)
        assert plan.lower_bound <= peak
    orders = planning.program_order(graph), planning.order(graph).operations
    assert found.peaks[-1] == min(planning.peak(graph, order) for order in orders)
    assert found.costs[-1] == 0


@pytest.mark.parametrize(
    "graph",
    [
        chain([(1, 1.0)] * 5),
        chain([(3, 2.0), (1, 5.0), (4, 1.0), (2, 3.0), (5, 2.0)]),
        chain([(8, 4.0), (6, 1.0), (2, 9.0), (6, 2.0)]),
        skips([6, 4, 2, 4, 6]),
    ],
)
def test_the_search_is_as_cheap_as_exhaustive_search(graph):
    found = planning.frontier(graph, cost=flops, effort=0.03)
    for part in (0.0, 0.3, 0.6):
        low, high = found.lower_bound, found.peaks[-1]
        budget = int(low + part * (high - low))
        least = cheapest(graph, budget)
        if np.isinf(least):
            assert found.peaks[0] > budget
        else:
            assert found.at(budget).cost == pytest.approx(least)


def test_a_smaller_budget_has_neither_the_larger_peak_nor_the_lower_cost():
    random = np.random.default_rng(3)
    layers = zip(random.integers(1, 40, 12), random.integers(1, 20, 12), strict=True)
    graph = chain([(int(size), cost) for size, cost in layers])
    budgets = np.linspace(0.5, 1.1, 60) * planning.peak(graph)
    found = planning.frontier(graph, cost=flops, effort=0.01)
    plans = [found.at(b) if b >= found.peaks[0] else None for b in budgets]
    assert plans[-1].sequence == tuple(range(25))
    for less, more in itertools.pairwise(plans):
        assert less is None or less.peak <= more.peak and less.cost >= more.cost
    for budget, plan in zip(budgets, plans, strict=True):
        assert plan is None or plan.peak <= budget


def test_one_call_gives_what_the_frontier_has_and_again():
    graph = skips([6, 4, 2, 4, 6])
    budget = 0.85 * planning.peak(graph)
    found = planning.frontier(graph, cost=flops, effort=0.01).at(budget)
    for _ in range(2):
        plan = planning.rematerialise(graph, budget, cost=flops, effort=0.01)
        assert plan.sequence == found.sequence
        assert plan.cost == found.cost


def test_a_long_chain_needs_the_root_of_its_length_for_a_forward_pass_more():
    length = 36
    graph = chain([(1, 1.0)] * length)
    sequences = chain_plans(
        SequenceTables(graph),
        np.array([o.flops for o in graph.operations]),
        SequenceTables(graph).events(np.arange(len(graph.operations))),
    )
    plans = [
        (max(sequence_profile(graph, s)) / 4, len(s) - 2 * length - 1)
        for s in (s.tolist() for s in sequences)
    ]
    # sqrt(36) beginnings, a segment of as many, and the gradients.
    assert min(more for peak, more in plans if peak <= 6 + 6 + 4) <= length
    # Nested: less memory, more than once.
    assert min(peak for peak, _ in plans) <= 8


def blocks(widths, inner):
    """Blocks of `inner` operations twice as wide as what crosses between two."""
    return [(2 * w if k else w, 1.0) for w in widths for k in range(inner)]


def least_of_chain_plans(graph, cost):
    """The least peak of chain plans that cost no more than that."""
    tables, count = SequenceTables(graph), len(graph.operations)
    costs = np.array([o.flops for o in graph.operations])
    plain = tables.events(np.arange(count))
    more = lambda s: float((np.bincount(s, minlength=count) - 1) @ costs)
    found = [
        (tables.events(s).peak, more(s)) for s in chain_plans(tables, costs, plain)
    ]
    return min((peak for peak, price in found if price <= cost), default=plain.peak)


@pytest.mark.slow
def test_wide_blocks_are_cut_where_a_long_narrow_end_follows():
    wide, narrow, inner = [16] * 8, [1] * 16, 6
    graph = chain(blocks(wide + narrow, inner))
    kept = sum(wide) + sum(narrow)
    inside = 16 * (1 + 2 * (inner - 1))
    # Each block from its beginning, its values all there, and two gradients.
    budget = 4 * (kept + inside + 2 * 2 * 16)
    forward = len(wide + narrow) * inner
    assert max(planning.profile(graph)) > 4 * budget
    assert least_of_chain_plans(graph, forward) <= budget / 2


def test_checkmates_vgg19_fits_a_batch_of_289_where_keeping_all_fits_222():
    network = vgg()
    layers = network.ordered()
    found = planning.frontier(training_graph(layers), cost=flops, effort=0.01)
    forward = sum(layer.flops for layer in layers)
    peak = next(
        p for p, c in zip(found.peaks, found.costs, strict=True) if c <= forward
    )
    room = 16e9 - 8 * network.parameters
    assert room // found.peaks[-1] == 222
    assert room // peak == 289


def test_cost_is_not_a_count():
    # Both free the same bytes; the flops of one are dear, the traffic of the other.
    operations = [
        Operation("dear", (), (0,), flops=1e9, moved=4.0),
        Operation("cheap", (), (1,), flops=1e3, moved=4e6),
        Operation("wide", (), (2,), moved=4.0),
        Operation("narrow", (2,), (3,), moved=4.0),
        Operation("join", (0, 1, 3), (4,), moved=4.0),
    ]
    graph = Graph(
        tuple(operations), tuple(Value(b) for b in (50, 50, 80, 10, 10)), (), (4,)
    )
    for machine, expected in (
        (planning.seconds(peak_flops=1e9, bandwidth=1e12), 1),
        (planning.seconds(peak_flops=1e15, bandwidth=1e6), 0),
    ):
        plan = planning.rematerialise(graph, 150, order="program", cost=machine)
        assert plan.recomputed == (expected,)
        assert plan.cost == pytest.approx(machine(operations[expected]))


def test_out_of_reach_says_what_is_least_and_what_is_there():
    operations = (
        Operation("embed", (), (0,), flops=1.0, path="model/embed"),
        Operation("dot", (0,), (1,), flops=1.0),
        Operation("loss", (0, 1), (2,), flops=1.0),
    )
    values = (Value(60, "f32[15]"), Value(40, "f32[10]"), Value(4, "f32[]"))
    graph = Graph(operations, values, (), (2,))
    with pytest.raises(planning.OutOfReach, match="the least peak found is 104") as e:
        planning.rematerialise(graph, 100)
    assert e.value.least == 104
    assert e.value.holders == (
        (60, "f32[15] of embed model/embed"),
        (40, "f32[10] of dot"),
        (4, "f32[] of loss"),
    )


def test_bad_input_is_refused():
    graph = chain([(1, 1)] * 3)
    with pytest.raises(ValueError, match="budget=.*: a number, at least 0"):
        planning.rematerialise(graph, -1)
    with pytest.raises(ValueError, match=r"cost: must be finite .* operations\[0\]"):
        planning.rematerialise(graph, 10, cost=lambda o: -1.0)
    donated = Graph(
        (Operation("update", (0,), (1,)),),
        (Value(4), Value(4)),
        (0,),
        (1,),
        {1: 0},
    )
    with pytest.raises(ValueError, match="exact: only for graphs without aliases"):
        planning.rematerialise(donated, 10, exact=True)


def test_a_graph_without_operations_and_one_without_time():
    assert planning.rematerialise(Graph((), ()), 0).sequence == ()
    graph = chain([(1, 1.0)] * 6)
    found = planning.frontier(graph, cost=flops, time_limit=0.0)
    assert not found.complete
    assert found.at(planning.peak(graph)).sequence == tuple(range(13))


def test_progress_comes_to_its_end():
    seen = []
    planning.frontier(
        chain([(1, 1.0)] * 6), cost=flops, effort=0.01, progress=seen.append
    )
    assert seen == sorted(seen) and seen[-1] == 1.0 and len(seen) > 5


@pytest.mark.slow
def test_a_transformer_of_2600_operations_is_planned_within_its_time(monkeypatch):
    # A minute of this process, whatever else the machine does.
    monkeypatch.setattr(time, "monotonic", time.process_time)
    graph = transformer()
    found = planning.frontier(graph)
    assert found.complete
    cost = planning.seconds()
    step = sum(cost(o) for o in graph.operations)
    assert found.at(0.1 * found.peaks[-1]).cost < 0.3 * step
