"""The `jaxmem` command, on top of the public functions: a file for each command."""

from jaxmem.cli._advise import advise
from jaxmem.cli._app import EXIT_CODES as EXIT_CODES
from jaxmem.cli._app import app as app
from jaxmem.cli._app import main as main
from jaxmem.cli._app import register
from jaxmem.cli._audit import audit
from jaxmem.cli._check import check
from jaxmem.cli._demo import demo
from jaxmem.cli._diff import diff
from jaxmem.cli._estimate import estimate
from jaxmem.cli._explain import explain
from jaxmem.cli._layout import layout
from jaxmem.cli._ledger import ledger
from jaxmem.cli._lint import lint
from jaxmem.cli._max_batch import max_batch
from jaxmem.cli._plan import plan
from jaxmem.cli._residuals import residuals
from jaxmem.cli._sweep import sweep
from jaxmem.cli._targets import targets

# in the order of the help
register(estimate, "estimate")
register(residuals, "residuals")
register(max_batch, "max-batch")
register(sweep, "sweep")
register(plan, "plan")
register(advise, "advise")
register(lint, "lint")
register(audit, "audit")
register(check, "check")
register(diff, "diff")
register(explain, "explain")
register(ledger, "ledger")
register(targets, "targets")
register(demo, "demo")
register(layout, "layout")
