"""What cuDNN's attention takes, which a jaxpr shows as one call."""

from jaxmem.chips import Rates
from jaxmem.ir.jaxprs import elements
from jaxmem.ir.shards import WHOLE, Shardings
from jaxmem.ir.types import JaxprEqn

_NAME = "dot_product_attention_fwd"  # of JAX's primitives for it, wrapped or not
# of the rate of products: between its own are exponentials. The share is that of
# the predicted seconds of compiled steps, in which other products are below it too.
_SHARE = 0.54


def is_library_attention(eqn: JaxprEqn) -> bool:
    """Whether it is the forward pass of cuDNN's attention."""
    return eqn.primitive.name.startswith(_NAME) and "mask_type" in eqn.params


def attention_seconds(
    eqn: JaxprEqn, rates: Rates, shardings: Shardings = WHOLE
) -> float:
    """How long its two products take; under a causal mask half of each."""
    queries, keys = (v.aval.shape for v in eqn.invars[:2])
    # [batch, length, heads, width], or with heads before the length
    length = keys[2 if eqn.params["layout"] else 1]
    seen = 0.5 if "CAUSAL" in str(eqn.params["mask_type"]) else 1.0
    done = 4.0 * elements(queries) * length * seen / shardings.workers(eqn)
    return done / (_SHARE * rates.narrow)
