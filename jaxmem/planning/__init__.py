"""Plans over plain graphs: the order, the layout in memory, and what to recompute.

It depends on numpy and scipy alone: a graph need not come from a jaxpr. `order` has the
searches for an order, `layout` those for offsets in an arena, `remat` those for
recomputation under a budget. They share the graph (`_graph`), the bytes that are alive
(`_live_ranges`) and their lower bounds (`_lower_bound`).
"""

from jaxmem.planning._graph import Graph as Graph
from jaxmem.planning._graph import Operation as Operation
from jaxmem.planning._graph import Value as Value
from jaxmem.planning._live_ranges import peak as peak
from jaxmem.planning._live_ranges import profile as profile
from jaxmem.planning._lower_bound import lower_bound as lower_bound
from jaxmem.planning.layout.arena import Layout as Layout
from jaxmem.planning.layout.arena import NoLayoutError as NoLayoutError
from jaxmem.planning.layout.buffers import Buffer as Buffer
from jaxmem.planning.layout.buffers import Gap as Gap
from jaxmem.planning.layout.buffers_csv import read_buffers as read_buffers
from jaxmem.planning.layout.buffers_csv import write_buffers as write_buffers
from jaxmem.planning.layout.lifetimes import Lifetimes as Lifetimes
from jaxmem.planning.layout.lifetimes import lifetimes as lifetimes
from jaxmem.planning.layout.search import best_fit as best_fit
from jaxmem.planning.layout.search import layout as layout
from jaxmem.planning.order.greedy import best_greedy as best_greedy
from jaxmem.planning.order.greedy import depth_first_order as depth_first_order
from jaxmem.planning.order.greedy import (
    least_peak_first_order as least_peak_first_order,
)
from jaxmem.planning.order.greedy import list_order as list_order
from jaxmem.planning.order.greedy import post_order as post_order
from jaxmem.planning.order.greedy import program_order as program_order
from jaxmem.planning.order.greedy import xla_order as xla_order
from jaxmem.planning.order.search import Order as Order
from jaxmem.planning.order.search import order as order
from jaxmem.planning.remat.budget import frontier as frontier
from jaxmem.planning.remat.budget import rematerialise as rematerialise
from jaxmem.planning.remat.costs import seconds as seconds
from jaxmem.planning.remat.frontier import Frontier as Frontier
from jaxmem.planning.remat.frontier import OutOfReach as OutOfReach
from jaxmem.planning.remat.frontier import Rematerialised as Rematerialised
from jaxmem.planning.remat.sequence import sequence_profile as sequence_profile

__all__ = [
    "Buffer",
    "Graph",
    "Operation",
    "Value",
    "frontier",
    "layout",
    "order",
    "rematerialise",
]
