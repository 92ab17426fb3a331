"""A step of any framework as a pure function: pytrees of arrays in and out."""

from jaxmem.frameworks import _equinox, _nnx
from jaxmem.frameworks._call import Call as Call
from jaxmem.frameworks._call import copied_objects as copied_objects
from jaxmem.frameworks._call import donated_and_static as donated_and_static
from jaxmem.frameworks._call import pure_call as pure_call
from jaxmem.frameworks._donated import named_leaves as named_leaves
from jaxmem.frameworks._form import Form as Form
from jaxmem.frameworks._jitted import Jitted as Jitted
from jaxmem.frameworks._jitted import jitted as jitted
from jaxmem.frameworks._places import Place as Place
from jaxmem.frameworks._scopes import module_scopes as module_scopes

is_equinox_module = _equinox.is_module
is_nnx_object = _nnx.is_object
