"""Private training: each example's gradient is clipped, then noise is added.

After Abadi et al. 2016, by `vmap` over the examples and optax's aggregation.
"""

from typing import NamedTuple

import flax.linen as nn
import jax
import optax

from tests.programs._common import arguments, of_size


class Size(NamedTuple):
    batch: int
    side: int
    width: int


class ConvNet(nn.Module):
    """Logits of one image [S, S, 1]."""

    width: int

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Conv(self.width, (3, 3))(x))
        x = nn.avg_pool(x, (2, 2), (2, 2))
        x = nn.relu(nn.GroupNorm(num_groups=4)(nn.Conv(2 * self.width, (3, 3))(x)))
        return nn.Dense(10)(nn.relu(nn.Dense(8 * self.width)(x.reshape(-1))))


def make(size: str):
    s = of_size(size, small=Size(4, 8, 4), big=Size(128, 28, 32))
    model = ConvNet(s.width)
    private = optax.contrib.differentially_private_aggregate(1.0, 1.1, key=0)
    tx = optax.chain(private, optax.sgd(0.1))

    def loss(params, image, label):
        logits = model.apply(params, image)
        return optax.softmax_cross_entropy_with_integer_labels(logits, label)

    def step(state, images, labels):
        params, moments = state
        each = jax.vmap(jax.value_and_grad(loss), in_axes=(None, 0, 0))
        values, grads = each(params, images, labels)
        updates, moments = tx.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), values.mean()

    def init(key):
        k = jax.random.split(key, 3)
        images = jax.random.normal(k[0], (s.batch, s.side, s.side, 1))
        params = model.init(k[1], images[0])
        labels = jax.random.randint(k[2], (s.batch,), 0, 10)
        return (params, tx.init(params)), images, labels

    return step, arguments(size, init), (0,)
