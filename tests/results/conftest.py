"""The run whose serving is proved: trained once for all files that ask for it."""
import pytest


@pytest.fixture(scope="session")
def served(tmp_path_factory):
    from served import proofs_of, trained
    with proofs_of(trained(tmp_path_factory.mktemp("served"))) as found: yield found
