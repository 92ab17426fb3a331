"""Users' promotion, as the reports have it, and versions of jax that are not here."""

import pytest

from jaxmem.faults import versions


@pytest.fixture(autouse=True)
def as_users_have_it(standard_jax):
    yield


@pytest.fixture
def of_version(monkeypatch):
    """Has the table believe that this version of jax is installed."""

    def believe(*version):
        monkeypatch.setattr(versions, "installed", lambda: version)

    return believe
