"""Optimizers with moments of a low rank: GaLore, Q-GaLore, APOLLO and Fira.

All treat a leaf with more than two axes as a stack of matrices: what they decompose,
scale and limit, they do matrix by matrix.
"""

from jaxmem.optim.low_rank.apollo import ApolloState as ApolloState
from jaxmem.optim.low_rank.apollo import apollo as apollo
from jaxmem.optim.low_rank.apollo import apollo_mini as apollo_mini
from jaxmem.optim.low_rank.apollo import scale_by_apollo as scale_by_apollo
from jaxmem.optim.low_rank.fira import FiraState as FiraState
from jaxmem.optim.low_rank.fira import fira as fira
from jaxmem.optim.low_rank.fira import scale_by_fira as scale_by_fira
from jaxmem.optim.low_rank.galore import scale_by_galore as scale_by_galore
from jaxmem.optim.low_rank.galore_paper import galore as galore
from jaxmem.optim.low_rank.galore_rule import GaLoreState as GaLoreState
from jaxmem.optim.low_rank.low_rank_sum import GaLoreSumState as GaLoreSumState
