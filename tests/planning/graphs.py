"""Graphs to plan: random ones, and training steps written by hand."""

import random
from collections.abc import Sequence

from jaxmem.planning import Graph, Operation, Value


class Builder:
    """A graph, an operation at a time."""

    def __init__(self):
        self.values: list[Value] = []
        self.operations: list[Operation] = []
        self.arguments: list[int] = []
        self.outputs: list[int] = []
        self.aliases: dict[int, int] = {}

    def value(self, size: int) -> int:
        self.values.append(Value(size))
        return len(self.values) - 1

    def argument(self, size: int) -> int:
        self.arguments.append(self.value(size))
        return self.arguments[-1]

    def do(self, name: str, inputs: Sequence[int], size: int, over=()) -> int:
        """An operation with one output, which may be written over some inputs."""
        made, inputs = self.value(size), tuple(dict.fromkeys(inputs))
        pairs = tuple((made, u) for u in over)
        self.operations.append(Operation(name, inputs, (made,), in_place=pairs))
        return made

    def output(self, v: int, donated: int | None = None) -> None:
        self.outputs.append(v)
        if donated is not None:
            self.aliases[v] = donated

    def graph(self) -> Graph:
        return Graph(
            tuple(self.operations),
            tuple(self.values),
            tuple(self.arguments),
            tuple(self.outputs),
            self.aliases,
        )


def chain(*sizes: int) -> Graph:
    """Operations one after another, the last value an output."""
    made = Builder()
    v = made.do("0", (), sizes[0])
    for k, size in enumerate(sizes[1:], 1):
        v = made.do(str(k), (v,), size)
    made.output(v)
    return made.graph()


# Sizes with which the graph in the comment of XLA's list scheduler behaves as it says.
COMMENT = dict(A=1, B=3, C=1, D=1, E=1, F=2, G=1)


def seven(A: int, B: int, C: int, D: int, E: int, F: int, G: int) -> Graph:
    """The graph in the comment of XLA's list scheduler.

    As it is drawn there B makes 2, and with these counts any order has 5 at least and
    the greedy one too; it takes a B that makes 3 for the greedy 6 that it tells of.
    """
    made = Builder()
    a = made.do("A", (), A)
    c = made.do("C", (made.do("B", (a,), B),), C)
    d, e = made.do("D", (a,), D), made.do("E", (a,), E)
    made.output(made.do("G", (c, made.do("F", (d, e), F)), G))
    return made.graph()


def training(
    layers: int, width: int = 64, tokens: int = 64, clipped: bool = False
) -> Graph:
    """A step of a residual network with three branches a layer, with Adam, donated.

    Weights are cast before use; activations are stored for the backward pass; all
    updates come at the end of the program, as they do in a jaxpr. With `clipped` they
    need the norm of all gradients.
    """
    made, names = Builder(), "qkvo"
    weight, activation = 4 * width * width, 2 * tokens * width
    state = {
        (layer, name): tuple(made.argument(weight) for _ in range(3))
        for layer in range(layers)
        for name in names
    }
    cast = {at: made.do("cast", (s[0],), weight // 2) for at, s in state.items()}
    x = made.do("embed", (made.argument(4 * tokens),), activation)
    stored = []
    for layer in range(layers):
        w = {name: cast[layer, name] for name in names}
        h = made.do("norm", (x,), activation)
        q, k, v = (made.do(name, (h, w[name]), activation) for name in "qkv")
        p = made.do("softmax", (q, k), 2 * tokens * tokens)
        o = made.do("attend", (p, v), activation)
        y = made.do("o", (o, w["o"]), activation)
        stored.append((x, h, q, k, v, p, o))
        x = made.do("add", (x, y), activation, over=(x, y))
    loss = made.do("loss", (x,), 4)
    made.output(loss)
    dx = made.do("d loss", (x, loss), activation, over=(x,))
    gradients = {}
    for layer in reversed(range(layers)):
        w = {name: cast[layer, name] for name in names}
        x, h, q, k, v, p, o = stored[layer]
        do = made.do("d o", (dx, w["o"]), activation)
        gradients[layer, "o"] = made.do("dW", (dx, o), weight)
        dp = made.do("d p", (do, v, p), 2 * tokens * tokens)
        d = {"v": made.do("d v", (do, p), activation)}
        d["q"] = made.do("d q", (dp, k), activation)
        d["k"] = made.do("d k", (dp, q), activation)
        for name in "qkv":
            gradients[layer, name] = made.do("dW", (d[name], h), weight)
        back = [made.do("d h", (d[name], w[name]), activation) for name in "qkv"]
        dh = made.do("add", back, activation, over=back)
        dx = made.do("d norm", (dx, dh, x), activation, over=(dx, dh))
    norm = [made.do("norm", tuple(gradients.values()), 4)] if clipped else []
    for at, (w, *moments) in state.items():
        new = [made.do("moment", (gradients[at], m, *norm), weight) for m in moments]
        made.output(made.do("update", (w, *new), weight), w)
        for v, m in zip(new, moments, strict=True):
            made.output(v, m)
    return made.graph()


def randomly(
    seed: int,
    n: int,
    near: int = 8,
    reads: int = 3,
    large: int = 9,
    plain: bool = False,
) -> Graph:
    """A random graph of `n` operations, which read what was made not long ago.

    Unless it is `plain`, with several outputs, scratch, donation, values without bytes
    and without readers, and outputs that may be written over one of several inputs.
    """
    rng = random.Random(seed)
    values, operations, made = [], [], []
    arguments = list(range(rng.randint(0, 3)))
    values += [Value(rng.randint(1, large)) for _ in arguments]
    for i in range(n):
        pool = made[-near:] + arguments
        inputs = rng.sample(pool, min(len(pool), rng.randint(0, reads)))
        count = 1 if plain else rng.choice((1, 1, 1, 2))
        outputs = range(len(values), len(values) + count)
        values += [Value(rng.randint(int(plain), large)) for _ in outputs]
        scratch = 0 if plain else rng.choice((0, 0, rng.randint(0, large)))
        pairs = [(v, u) for v in outputs for u in inputs if not plain]
        over = tuple(pair for pair in pairs if rng.random() < 0.4)
        operations.append(
            Operation(str(i), tuple(inputs), tuple(outputs), scratch, over)
        )
        made += outputs
    outputs = [v for v in made if rng.random() < 0.25]
    free = [] if plain else list(arguments)
    aliases = {v: free.pop() for v in outputs if free and rng.random() < 0.5}
    return Graph(
        tuple(operations), tuple(values), tuple(arguments), tuple(outputs), aliases
    )
