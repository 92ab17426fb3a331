"""Training steps of many kinds, in small and in big.

Each file is one program, and has `make(size)`: the step, its arguments and which of
them to donate. "small" has arrays, and runs in a moment; "big" has shapes, to be
compiled for a chip. A step takes its state, then a batch, and returns the new state
and what it reports.
"""

from collections.abc import Callable
from typing import NamedTuple

from tests.programs import (
    adapters,
    adversarial,
    autoencoder,
    bounded_loop,
    diffusion,
    experts,
    gaussian_process,
    graph_net,
    hessians,
    language_model,
    meta_learning,
    momentum_contrast,
    neural_ode,
    patches,
    policy,
    private_descent,
    radiance_field,
    recommender,
    recurrent,
    simulator,
    state_space,
    sum_of_matrices,
    two_views,
    waves,
)


class Program(NamedTuple):
    """A training step, by the name of its file."""

    name: str
    make: Callable[[str], tuple[Callable, tuple, tuple[int, ...]]]

    def __str__(self) -> str:
        return self.name


_MODULES = (
    *(graph_net, radiance_field, neural_ode, bounded_loop, meta_learning, adversarial),
    *(private_descent, state_space, simulator, waves, hessians, two_views),
    *(momentum_contrast, autoencoder, diffusion, recurrent, language_model),
    *(recommender, experts, sum_of_matrices, gaussian_process, adapters, patches),
    policy,
)
PROGRAMS = [Program(m.__name__.rpartition(".")[2], m.make) for m in _MODULES]
