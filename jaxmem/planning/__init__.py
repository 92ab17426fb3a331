"""Plans over plain graphs: in which order, at which offsets, what to compute twice.

Stands on numpy and scipy alone: what is planned need not be a jaxpr.
"""

from jaxmem.planning._bound import lower_bound as lower_bound
from jaxmem.planning._buffers import Buffer as Buffer
from jaxmem.planning._buffers import Gap as Gap
from jaxmem.planning._buffers_csv import read_buffers as read_buffers
from jaxmem.planning._buffers_csv import write_buffers as write_buffers
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
from jaxmem.planning._layout import Layout as Layout
from jaxmem.planning._layout import NoLayoutError as NoLayoutError
from jaxmem.planning._layout import best_fit as best_fit
from jaxmem.planning._layout import layout as layout
from jaxmem.planning._lifetimes import Lifetimes as Lifetimes
from jaxmem.planning._lifetimes import lifetimes as lifetimes
from jaxmem.planning._liveness import peak as peak
from jaxmem.planning._liveness import profile as profile
from jaxmem.planning._order import Order as Order
from jaxmem.planning._order import order as order
from jaxmem.planning._remat import Frontier as Frontier
from jaxmem.planning._remat import OutOfReach as OutOfReach
from jaxmem.planning._remat import Rematerialised as Rematerialised
from jaxmem.planning._remat import curve as curve
from jaxmem.planning._remat import frontier as frontier
from jaxmem.planning._remat import rematerialise as rematerialise
from jaxmem.planning._remat import seconds as seconds
from jaxmem.planning._remat_sequence import sequence_profile as sequence_profile
