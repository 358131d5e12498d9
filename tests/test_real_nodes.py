from nodes import nodes
import pytest


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    with nodes(tmp_path_factory.mktemp("nodes")) as made:
        yield made


def test_a(hosts):
    assert hosts.run("ssh", "n1", "hostname").stdout == "n1\n"


def test_b(hosts):
    assert not hosts.processes()
