"""What a training step keeps besides activations: bytes a parameter."""

from jaxmem.optim.ledgers.ledger import Ledger as Ledger
from jaxmem.optim.ledgers.measured import ledger as ledger
from jaxmem.optim.ledgers.row import LedgerRow as LedgerRow
