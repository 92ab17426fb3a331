"""The only folder that touches `jax._src` or `jax.extend`.

Everything here is private to JAX and may move; `tests/test_compat.py` calls each
function, so that a new JAX fails there, loudly, and not in a user's step.
"""

from jaxmem._compat.absent_devices import absent_gpu as absent_gpu
from jaxmem._compat.absent_devices import no_absent_gpu as no_absent_gpu
from jaxmem._compat.avals import empty_like as empty_like
from jaxmem._compat.avals import typed_as as typed_as
from jaxmem._compat.avals import varying_axes as varying_axes
from jaxmem._compat.avals import without_mesh as without_mesh
from jaxmem._compat.compiling import compile_module as compile_module
from jaxmem._compat.cudnn import cudnn_attention as cudnn_attention
from jaxmem._compat.cudnn import cudnn_attention_grads as cudnn_attention_grads
from jaxmem._compat.devices import cudnn_version as cudnn_version
from jaxmem._compat.devices import runs_here as runs_here
from jaxmem._compat.exports import export as export
from jaxmem._compat.exports import with_results_of_calls as with_results_of_calls
from jaxmem._compat.jaxprs import PRIMITIVES as PRIMITIVES
from jaxmem._compat.jaxprs import ClosedJaxpr as ClosedJaxpr
from jaxmem._compat.jaxprs import Jaxpr as Jaxpr
from jaxmem._compat.jaxprs import Literal as Literal
from jaxmem._compat.jaxprs import Primitive as Primitive
from jaxmem._compat.jaxprs import Var as Var
from jaxmem._compat.jaxprs import bind as bind
from jaxmem._compat.jaxprs import constants_first as constants_first
from jaxmem._compat.jaxprs import expanded as expanded
from jaxmem._compat.jaxprs import function_source as function_source
from jaxmem._compat.jaxprs import has_side_effects as has_side_effects
from jaxmem._compat.jaxprs import in_context_of as in_context_of
from jaxmem._compat.jaxprs import in_mesh as in_mesh
from jaxmem._compat.jaxprs import in_mesh_in_context as in_mesh_in_context
from jaxmem._compat.jaxprs import no_leak_check as no_leak_check
from jaxmem._compat.jaxprs import operation as operation
from jaxmem._compat.jaxprs import scan_counts as scan_counts
from jaxmem._compat.jaxprs import shard_map_again as shard_map_again
from jaxmem._compat.jaxprs import trace_state as trace_state
from jaxmem._compat.jaxprs import without_dead_code as without_dead_code
from jaxmem._compat.jitted import jit_info as jit_info
from jaxmem._compat.jitted import names_shardings as names_shardings
from jaxmem._compat.jobs import JobStore as JobStore
from jaxmem._compat.lowering import is_for_export as is_for_export
from jaxmem._compat.lowering import is_on_one_device as is_on_one_device
from jaxmem._compat.partitioning import counted_partitions as counted_partitions
from jaxmem._compat.partitioning import partitioned_by as partitioned_by
from jaxmem._compat.partitioning import partitions_in as partitions_in
from jaxmem._compat.platforms import is_for_tpu as is_for_tpu
from jaxmem._compat.platforms import traced_for_tpu as traced_for_tpu
from jaxmem._compat.propagation import propagated as propagated
from jaxmem._compat.random import is_partitionable as is_partitionable
from jaxmem._compat.random import is_threefry as is_threefry
from jaxmem._compat.random import threefry2x32 as threefry2x32
from jaxmem._compat.remat import forgets_its_names as forgets_its_names
from jaxmem._compat.remat import policy_names as policy_names
from jaxmem._compat.remat import saved_residuals as saved_residuals
from jaxmem._compat.shardings import is_unspecified as is_unspecified
from jaxmem._compat.shardings import mesh_of_specs as mesh_of_specs
from jaxmem._compat.shardings import uses_shardy as uses_shardy
from jaxmem._compat.sources import INSTALLED as INSTALLED
from jaxmem._compat.sources import OWN as OWN
from jaxmem._compat.sources import RECOMPUTED as RECOMPUTED
from jaxmem._compat.sources import caller_line as caller_line
from jaxmem._compat.sources import is_own_file as is_own_file
from jaxmem._compat.sources import is_own_line as is_own_line
from jaxmem._compat.sources import name_stack as name_stack
from jaxmem._compat.sources import source_line as source_line
from jaxmem._compat.splash import splash_attention_grads as splash_attention_grads
