"""Muon: momentum whose matrices are orthogonalised before they are a step."""

from jaxmem.optim.orthogonal.muon import muon as muon
from jaxmem.optim.orthogonal.rule import MuonState as MuonState
