"""Preconditioned gradients: Shampoo's matrices, and Adam in their eigenbasis."""

from jaxmem.optim.preconditioned.soap import scale_by_soap as scale_by_soap
from jaxmem.optim.preconditioned.soap import soap as soap
from jaxmem.optim.preconditioned.soap_rule import SoapState as SoapState
