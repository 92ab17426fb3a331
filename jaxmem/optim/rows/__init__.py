"""Tables whose gradients are rows: a few lines in an ordinary train step."""

from jaxmem.optim.rows.gradients import RowGradients as RowGradients
from jaxmem.optim.rows.rowwise import rowwise as rowwise
from jaxmem.optim.rows.rules import RowwiseAdagradState as RowwiseAdagradState
from jaxmem.optim.rows.rules import lazy_adam as lazy_adam
from jaxmem.optim.rows.rules import rowwise_adagrad as rowwise_adagrad
from jaxmem.optim.rows.rules import rowwise_sgd as rowwise_sgd
from jaxmem.optim.rows.rules import scale_by_rowwise_adagrad as scale_by_rowwise_adagrad
from jaxmem.optim.rows.value_and_grad import value_and_row_grad as value_and_row_grad
