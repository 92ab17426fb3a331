"""How fast a device sends to the others of a collective.

A TPU has links along each axis of a torus, and a collective uses those of all axes that
its devices lie along: of each a ring in both directions, or a line, which is half as
fast, where an axis is too short to close ("How to Scale Your Model", 2025, chapter 3).
"""

import math
from dataclasses import dataclass

from jaxmem.chips import Rates


@dataclass(frozen=True)
class Links:
    """What a collective has of them.

    Attributes:
        rate: bytes per second that a device sends.
        steps: from a device to all others, one after the other.
    """

    rate: float
    steps: float


def links_of(group: int, devices: int, rates: Rates) -> Links:
    """The links of a collective.

    Args:
        group: its devices.
        devices: of the step, whose torus is taken for a square or a cube.
        rates: of the chip.
    """
    group = max(2, group)
    if rates.axes == 1:
        return Links(rates.link, group - 1)
    side = max(2.0, devices ** (1 / rates.axes))
    axes = min(rates.axes, max(1, round(math.log(group) / math.log(side))))
    closed = round(side, 6) >= rates.ring
    rate = rates.link * axes * (1.0 if closed else 0.5)
    return Links(rate, axes * (group ** (1 / axes) - 1))
