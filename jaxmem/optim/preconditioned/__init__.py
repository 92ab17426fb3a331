"""Preconditioned gradients: Shampoo, and Adam in the eigenbasis of its matrices."""

from jaxmem.optim.preconditioned.shampoo import scale_by_shampoo as scale_by_shampoo
from jaxmem.optim.preconditioned.shampoo import shampoo as shampoo
from jaxmem.optim.preconditioned.shampoo_rule import ShampooState as ShampooState
from jaxmem.optim.preconditioned.soap import scale_by_soap as scale_by_soap
from jaxmem.optim.preconditioned.soap import soap as soap
from jaxmem.optim.preconditioned.soap_rule import SoapState as SoapState
