"""Every family of models that others wrote: values, bytes, schedules, lint.

They need the extra `foreign`; a library that is not there is skipped as a whole. Its
table of bytes is written by `python -m benchmarks.foreign`.
"""

import importlib.util

import pytest

from benchmarks.models.foreign import families
from tests.foreign import checks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.foreign,
    # these libraries use names of jax and flax that newer versions deprecate
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def _cases(libraries=checks.LIBRARIES):
    for library in libraries:
        if importlib.util.find_spec(library) is None:
            reason = f"{library} is not installed: pip install '.[foreign]'"
            skip = pytest.mark.skip(reason=reason)
            yield pytest.param(library, "", marks=skip, id=library)
            continue
        yield from (pytest.param(*f, id="-".join(f)) for f in families([library]))


@pytest.mark.parametrize(("library", "family"), list(_cases()))
@pytest.mark.parametrize("check", checks.every_check)
def test_every_family(check, library, family):
    checks.every_check[check](checks.built(library, family))
