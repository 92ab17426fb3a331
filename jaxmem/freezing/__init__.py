"""Training a part of the parameters: gradients and moments for that part alone.

`trainable` splits parameters in what is trained and what is frozen, `value_and_grad`
differentiates by the first alone. Nothing is kept, computed or stored for the rest: no
zero gradients, no moments, and no activations that only its gradients would need.
"""

from jaxmem.freezing._part import Frozen as Frozen
from jaxmem.freezing._part import Part as Part
from jaxmem.freezing._part import value_and_grad as value_and_grad
from jaxmem.freezing._table import Sizes as Sizes
from jaxmem.freezing._trainable import trainable as trainable
