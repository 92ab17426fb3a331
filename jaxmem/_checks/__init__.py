"""Checks of arguments.

Each check returns the argument in one plain form, or raises an error with its name, its
value and what is allowed: TypeError for a value of another kind, ValueError for one of
the right kind but out of range. NumPy's numbers and 0-d arrays of NumPy and JAX count
as numbers; a bool does not.
"""

from jaxmem._checks.arrays import check_array as check_array
from jaxmem._checks.arrays import check_dtype as check_dtype
from jaxmem._checks.arrays import check_key as check_key
from jaxmem._checks.arrays import check_precision as check_precision
from jaxmem._checks.messages import array_text as array_text
from jaxmem._checks.messages import shown as shown
from jaxmem._checks.messages import wrong_type as wrong_type
from jaxmem._checks.messages import wrong_value as wrong_value
from jaxmem._checks.names import check_axis_name as check_axis_name
from jaxmem._checks.names import check_callable as check_callable
from jaxmem._checks.names import check_choice as check_choice
from jaxmem._checks.names import check_donated as check_donated
from jaxmem._checks.names import check_names as check_names
from jaxmem._checks.names import check_options as check_options
from jaxmem._checks.names import check_places as check_places
from jaxmem._checks.names import check_static as check_static
from jaxmem._checks.names import check_text as check_text
from jaxmem._checks.numbers import check_bool as check_bool
from jaxmem._checks.numbers import check_count as check_count
from jaxmem._checks.numbers import check_float as check_float
from jaxmem._checks.numbers import check_int as check_int
from jaxmem._checks.numbers import check_numbers as check_numbers
from jaxmem._checks.numbers import check_scalar as check_scalar
from jaxmem._checks.plain import OneOf as OneOf
from jaxmem._checks.plain import Range as Range
from jaxmem._checks.plain import from_plain as from_plain
