"""Training graphs as plain data: networks as Checkmate counts them, and a transformer.

`training_graph` joins forward and backward pass as the artifact of "Checkmate" (Jain et
al., https://arxiv.org/abs/1910.02653) does, layer by layer, float32, no input image and
no parameters: the gradient of a layer's output has the bytes of that output, takes
twice its operations, and reads that output, the outputs of the layers that read it, and
their gradients. Operations are multiplications: a convolution's outputs times its
kernel and input channels, 4 an element of a batch norm, 1 of an activation, 2 of an
addition, none of a pool, a concatenation, a padding or a reshape. Layers stand in
Keras's order: by distance from the output, the farthest first.
"""

import math
from dataclasses import dataclass, field

from jaxmem.planning import Graph, Operation, Value

F32 = 4


@dataclass(frozen=True)
class Layer:
    """Inputs by number (none for those that read the image), output shape, cost."""

    name: str
    inputs: tuple[int, ...]
    shape: tuple[int, ...]
    flops: float


@dataclass
class Network:
    """Layers as they are added, of one image.

    Attributes:
      parameters: how many, those that are not trained too.
    """

    image: tuple[int, int, int]
    layers: list[Layer] = field(default_factory=list)
    parameters: int = 0

    def shape(self, at: int) -> tuple[int, ...]:
        return self.layers[at].shape if at >= 0 else self.image

    def _add(self, name, inputs, shape, flops=0.0) -> int:
        inputs = tuple(i for i in inputs if i >= 0)
        self.layers.append(Layer(name, inputs, shape, flops))
        return len(self.layers) - 1

    def conv(self, at, channels, kernel=3, stride=1, same=True, bias=True) -> int:
        height, width, depth = self.shape(at)
        if same:
            height, width = -(-height // stride), -(-width // stride)
        else:
            height = (height - kernel) // stride + 1
            width = (width - kernel) // stride + 1
        self.parameters += kernel**2 * depth * channels + bias * channels
        shape = (height, width, channels)
        return self._add("conv", (at,), shape, kernel**2 * depth * math.prod(shape))

    def depthwise(self, at, stride=1) -> int:
        height, width, depth = self.shape(at)
        if stride == 2:  # of a padded input
            height, width = (height - 3) // 2 + 1, (width - 3) // 2 + 1
        self.parameters += 9 * depth
        shape = (height, width, depth)
        return self._add("depthwise", (at,), shape, 9 * math.prod(shape))

    def norm(self, at) -> int:
        self.parameters += 4 * self.shape(at)[-1]
        return self._add("norm", (at,), self.shape(at), 4 * math.prod(self.shape(at)))

    def relu(self, at) -> int:
        return self._add("relu", (at,), self.shape(at), math.prod(self.shape(at)))

    def pad(self, at, by) -> int:
        height, width, depth = self.shape(at)
        return self._add("pad", (at,), (height + by, width + by, depth))

    def pool(self, at, size=2, stride=2) -> int:
        height, width, depth = self.shape(at)
        shape = ((height - size) // stride + 1, (width - size) // stride + 1, depth)
        return self._add("pool", (at,), shape)

    def mean(self, at) -> int:
        return self._add("mean", (at,), self.shape(at)[-1:])

    def up(self, at) -> int:
        height, width, depth = self.shape(at)
        shape = (2 * height, 2 * width, depth)
        return self._add("up", (at,), shape, math.prod(shape))

    def joined(self, a, b) -> int:
        shape = (*self.shape(a)[:-1], self.shape(a)[-1] + self.shape(b)[-1])
        return self._add("concatenate", (a, b), shape)

    def sum(self, a, b) -> int:
        return self._add("add", (a, b), self.shape(a), 2 * math.prod(self.shape(a)))

    def reshape(self, at, *shape) -> int:
        return self._add("reshape", (at,), shape)

    def dense(self, at, width) -> int:
        (depth,) = self.shape(at)
        self.parameters += depth * width + width
        return self._add("dense", (at,), (width,), depth * width)

    def ordered(self) -> list[Layer]:
        """The layers by distance from the last one, the farthest first."""
        distance = [0] * len(self.layers)
        for at in range(len(self.layers) - 1, -1, -1):
            for i in self.layers[at].inputs:
                distance[i] = max(distance[i], distance[at] + 1)
        order = sorted(range(len(self.layers)), key=lambda at: -distance[at])
        place = {at: k for k, at in enumerate(order)}
        found = [self.layers[at] for at in order]
        return [
            Layer(x.name, tuple(place[i] for i in x.inputs), x.shape, x.flops)
            for x in found
        ]


def training_graph(layers: list[Layer], batch: int = 1) -> Graph:
    """Forward pass, loss and the gradient of each layer's output."""
    count = len(layers)
    readers: list[list[int]] = [[] for _ in layers]
    for at, layer in enumerate(layers):
        for i in layer.inputs:
            readers[i].append(at)
    size = [F32 * batch * math.prod(layer.shape) for layer in layers]
    values = [Value(s) for s in size] + [Value(F32 * batch)]
    values += [Value(s) for s in reversed(size)]
    gradient = lambda at: 2 * count - at
    operations = [
        Operation(x.name, x.inputs, (at,), flops=float(batch * x.flops))
        for at, x in enumerate(layers)
    ]
    operations.append(Operation("loss", (count - 1,), (count,)))
    for at in reversed(range(count)):
        reads = [at, *readers[at], *(gradient(r) for r in readers[at])]
        reads += [count] if at == count - 1 else []
        flops = 2.0 * batch * layers[at].flops
        name = f"gradient of {layers[at].name}"
        operations.append(Operation(name, tuple(reads), (gradient(at),), flops=flops))
    return Graph(tuple(operations), tuple(values), (), (gradient(0),))


def vgg(convolutions: tuple[int, ...] = (2, 2, 4, 4, 4)) -> Network:
    """VGG19 at 224 by 224; (2, 2, 3, 3, 3) for VGG16."""
    net, at = Network((224, 224, 3)), -1
    for count, width in zip(convolutions, (64, 128, 256, 512, 512), strict=True):
        for _ in range(count):
            at = net.conv(at, width)
        at = net.pool(at)
    at = net.reshape(at, math.prod(net.shape(at)))
    for width in (4096, 4096, 1000):
        at = net.dense(at, width)
    return net


def mobilenet() -> Network:
    """MobileNet v1 at 224 by 224."""
    net = Network((224, 224, 3))

    def finished(at):
        return net.relu(net.norm(at))

    at = net.pad(-1, 1)
    at = finished(net.conv(at, 32, stride=2, same=False, bias=False))
    widths = (64, 128, 128, 256, 256, *([512] * 6), 1024, 1024)
    for block, width in enumerate(widths):
        stride = 2 if block in (1, 3, 5, 11) else 1
        at = net.pad(at, 1) if stride == 2 else at
        at = finished(net.depthwise(at, stride))
        at = finished(net.conv(at, width, kernel=1, bias=False))
    at = net.reshape(net.mean(at), 1, 1, 1024)
    at = net.reshape(at, 1, 1, 1024)  # the dropout
    at = net.reshape(net.conv(at, 1000, kernel=1), 1000)
    net.relu(at)  # the softmax counts as an activation
    return net


def resnet50() -> Network:
    """ResNet50 at 224 by 224."""
    net = Network((224, 224, 3))
    at = net.conv(net.pad(-1, 6), 64, kernel=7, stride=2, same=False)
    at = net.pool(net.pad(net.relu(net.norm(at)), 2), 3)
    for width, count, first in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for block in range(count):
            stride = first if block == 0 else 1
            side = at
            if block == 0:
                side = net.norm(net.conv(at, 4 * width, kernel=1, stride=stride))
            at = net.relu(net.norm(net.conv(at, width, kernel=1, stride=stride)))
            at = net.relu(net.norm(net.conv(at, width)))
            at = net.norm(net.conv(at, 4 * width, kernel=1))
            at = net.relu(net.sum(side, at))
    net.dense(net.mean(at), 1000)
    return net


def unet() -> Network:
    """U-Net on VGG16's first four stages at 416 by 608, 19 classes."""
    net, at, levels = Network((416, 608, 3)), -1, []
    for count, width in zip((2, 2, 3, 3), (64, 128, 256, 512), strict=True):
        for _ in range(count):
            at = net.conv(at, width)
        at = net.pool(at)
        levels.append(at)
    for width, skip in zip((512, 256, 128), levels[2::-1], strict=True):
        at = net.norm(net.conv(net.pad(at, 2), width, same=False))
        at = net.joined(net.up(at), skip)
    at = net.norm(net.conv(net.pad(at, 2), 64, same=False))
    at = net.conv(at, 19)
    height, width, classes = net.shape(at)
    net.relu(net.reshape(at, height * width, classes))
    return net


class _Tape:
    """A computation and its derivatives, operation by operation."""

    def __init__(self):
        self.values: list[Value] = []
        self.operations: list[Operation] = []
        self.arguments: list[int] = []
        self._back: list = []

    def argument(self, size: int) -> int:
        self.values.append(Value(size))
        self.arguments.append(len(self.values) - 1)
        return self.arguments[-1]

    def make(self, name, inputs, size, flops=0.0, over=()) -> int:
        self.values.append(Value(int(size)))
        made = len(self.values) - 1
        moved = self.values[made].bytes + sum(self.values[v].bytes for v in inputs)
        in_place = tuple((made, u) for u in over)
        self.operations.append(
            Operation(name, tuple(inputs), (made,), 0, in_place, flops, float(moved))
        )
        return made

    def linear(self, x, weight, rows, depth, width) -> int:
        flops = 2.0 * rows * depth * width
        y = self.make("dot", (x, weight), 2 * rows * width, flops)

        def back(grads):
            dy = grads.pop(y)
            self._sum(grads, x, self.make("dot", (dy, weight), 2 * rows * depth, flops))
            dw = self.make("dot", (x, dy), 4 * depth * width, flops)
            self.make("update", (weight, dw), self.values[weight].bytes)

        self._back.append(back)
        return y

    def product(self, name, a, b, size, flops) -> int:
        y = self.make(name, (a, b), size, flops)

        def back(grads):
            dy = grads.pop(y)
            for one, other in ((a, b), (b, a)):
                d = self.make(name, (dy, other), self.values[one].bytes, flops)
                self._sum(grads, one, d)

        self._back.append(back)
        return y

    def unary(self, name, x, keeps_output=False) -> int:
        size = self.values[x].bytes
        y = self.make(name, (x,), size, 8.0 * size)

        def back(grads):
            dy = grads.pop(y)
            read = y if keeps_output else x
            d = self.make(f"{name}'", (dy, read), size, 8.0 * size, over=(dy,))
            self._sum(grads, x, d)

        self._back.append(back)
        return y

    def add(self, a, b) -> int:
        y = self.make("add", (a, b), self.values[a].bytes, 0.0)

        def back(grads):
            dy = grads.pop(y)
            self._sum(grads, a, dy)
            self._sum(grads, b, dy)

        self._back.append(back)
        return y

    def _sum(self, grads, v, d) -> None:
        if v in grads:
            d = self.make("add", (grads[v], d), self.values[v].bytes, over=(grads[v],))
        grads[v] = d

    def backward(self, loss: int) -> None:
        grads = {loss: self.make("ones", (), self.values[loss].bytes)}
        for back in reversed(self._back):
            back(grads)

    def graph(self) -> Graph:
        made = [o.outputs[0] for o in self.operations if o.name == "update"]
        olds = [o.inputs[0] for o in self.operations if o.name == "update"]
        aliases = dict(zip(made, olds, strict=True))
        return Graph(
            tuple(self.operations),
            tuple(self.values),
            tuple(self.arguments),
            tuple(made),
            aliases,
        )


def transformer(
    blocks: int = 50, batch: int = 8, sequence: int = 512, width: int = 1024, heads=16
) -> Graph:
    """A step of a decoder, bfloat16 activations: about 50 operations a block.

    Every weight is updated right after its gradient, in place.
    """
    tape, rows = _Tape(), batch * sequence
    x = tape.make("embed", (tape.argument(64),), 2 * rows * width)
    scores = 2 * batch * heads * sequence**2
    attention = 2.0 * batch * sequence**2 * width
    weight = lambda a, b: tape.argument(2 * a * b)
    for _ in range(blocks):
        h = tape.unary("norm", x)
        q, k, v = (
            tape.linear(h, weight(width, width), rows, width, width) for _ in range(3)
        )
        s = tape.product("qk", q, k, scores, attention)
        s = tape.unary("mask", s)
        s = tape.unary("softmax", s, keeps_output=True)
        s = tape.unary("dropout", s)
        a = tape.product("av", s, v, 2 * rows * width, attention)
        a = tape.linear(a, weight(width, width), rows, width, width)
        x = tape.add(x, tape.unary("dropout", a))
        h = tape.unary("norm", x)
        h = tape.linear(h, weight(width, 4 * width), rows, width, 4 * width)
        h = tape.unary("gelu", h)
        h = tape.linear(h, weight(4 * width, width), rows, 4 * width, width)
        x = tape.add(x, tape.unary("dropout", h))
    tape.backward(tape.unary("loss", x))
    return tape.graph()
