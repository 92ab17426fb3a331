"""Plans over plain graphs: in which order, at which offsets, what to compute twice.

Stands on numpy and scipy alone: what is planned need not be a jaxpr.
"""

from jaxmem.planning._bound import lower_bound as lower_bound
from jaxmem.planning._graph import Graph as Graph
from jaxmem.planning._graph import Operation as Operation
from jaxmem.planning._graph import Value as Value
from jaxmem.planning._greedy import best_greedy as best_greedy
from jaxmem.planning._greedy import depth_first_order as depth_first_order
from jaxmem.planning._greedy import least_peak_first_order as least_peak_first_order
from jaxmem.planning._greedy import list_order as list_order
from jaxmem.planning._greedy import post_order as post_order
from jaxmem.planning._greedy import program_order as program_order
from jaxmem.planning._greedy import xla_order as xla_order
from jaxmem.planning._liveness import peak as peak
from jaxmem.planning._liveness import profile as profile
from jaxmem.planning._order import Order as Order
from jaxmem.planning._order import order as order
