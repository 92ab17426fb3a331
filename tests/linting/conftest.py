"""Users' promotion: the steps are written as users write them."""

import pytest


@pytest.fixture(autouse=True)
def as_users_have_it(standard_jax):
    yield
