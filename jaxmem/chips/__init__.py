"""The chips that a step can be compiled for. The table is in `_table.py`."""

from jaxmem.chips._compilers import compiler_folders as compiler_folders
from jaxmem.chips._compilers import compiler_versions as compiler_versions
from jaxmem.chips._compilers import version_of as version_of
from jaxmem.chips._devices import AbstractGpu as AbstractGpu
from jaxmem.chips._devices import chip_mesh as chip_mesh
from jaxmem.chips._devices import config_text as config_text
from jaxmem.chips._devices import kernel_of as kernel_of
from jaxmem.chips._devices import lowered_for as lowered_for
from jaxmem.chips._devices import target_mesh as target_mesh
from jaxmem.chips._devices import topology as topology
from jaxmem.chips._devices import traced_for as traced_for
from jaxmem.chips._folder import CompilerFolder as CompilerFolder
from jaxmem.chips._folder import home as home
from jaxmem.chips._folder import installed_folders as installed_folders
from jaxmem.chips._folder import remove_folder as remove_folder
from jaxmem.chips._install import InstallError as InstallError
from jaxmem.chips._install import install_compilers as install_compilers
from jaxmem.chips._quiet import NO_HARDWARE as NO_HARDWARE
from jaxmem.chips._quiet import silence_absent_hardware
from jaxmem.chips._rates import Rates as Rates
from jaxmem.chips._rates import is_timed as is_timed
from jaxmem.chips._rates import rates_of as rates_of
from jaxmem.chips._table import CHIPS as CHIPS
from jaxmem.chips._target import Target as Target
from jaxmem.chips._target import Targets as Targets
from jaxmem.chips._target import get_target as get_target
from jaxmem.chips._target import is_gpu as is_gpu
from jaxmem.chips._target import local_target as local_target
from jaxmem.chips._target import targets as targets
from pallas_kernels.lowering import is_choice as is_choice

silence_absent_hardware()
