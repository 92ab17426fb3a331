"""A step of any framework as a pure function: pytrees of arrays in and out.

A framework is a file here and its line below; `Framework` tells what is in it.
"""

from jaxmem.frameworks._call import Call as Call
from jaxmem.frameworks._call import donated_and_static as donated_and_static
from jaxmem.frameworks._call import pure_call as pure_call
from jaxmem.frameworks._donated import named_leaves as named_leaves
from jaxmem.frameworks._form import Form as Form
from jaxmem.frameworks._jitted import Jitted as Jitted
from jaxmem.frameworks._named_arrays import named_arrays as named_arrays
from jaxmem.frameworks._places import Place as Place
from jaxmem.frameworks._scopes import module_scopes as module_scopes
from jaxmem.frameworks._shardings import canonical as canonical
from jaxmem.frameworks._split_object import SplitObject as SplitObject
from jaxmem.frameworks.equinox import Equinox
from jaxmem.frameworks.framework import Framework as Framework
from jaxmem.frameworks.haiku import Haiku
from jaxmem.frameworks.linen import Linen
from jaxmem.frameworks.nnx import Nnx
from jaxmem.frameworks.registry import framework_of as framework_of
from jaxmem.frameworks.registry import has_models as has_models
from jaxmem.frameworks.registry import has_objects as has_objects
from jaxmem.frameworks.registry import is_object as is_object
from jaxmem.frameworks.registry import jitted as jitted
from jaxmem.frameworks.registry import map_arrays as map_arrays
from jaxmem.frameworks.registry import register as register
from jaxmem.frameworks.registry import taking_apart as taking_apart
from jaxmem.frameworks.registry import unregister as unregister
from jaxmem.frameworks.training import OVERWRITE as OVERWRITE
from jaxmem.frameworks.training import Held as Held
from jaxmem.frameworks.training import StepForm as StepForm

register(Nnx())
register(Equinox())
register(Linen())
register(Haiku())
