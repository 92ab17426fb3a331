"""Training some of the parameters: gradients and moments for those alone.

`trainable` splits parameters into trained and frozen ones, and `value_and_grad`
differentiates with respect to the trained ones. The frozen ones cost nothing more: no
zero gradients, no moments, and no activations that only their gradients would need.
"""

from jaxmem.freezing._split import Frozen as Frozen
from jaxmem.freezing._split import SplitParameters as SplitParameters
from jaxmem.freezing._split import value_and_grad as value_and_grad
from jaxmem.freezing._table import TrainedSizes as TrainedSizes
from jaxmem.freezing._trainable import trainable as trainable

__all__ = [
    "trainable",
    "value_and_grad",
]
