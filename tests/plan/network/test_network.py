"""Cost networks."""

import numpy as np
import pytest

from tutti.plan.network.network import Network


@pytest.fixture
def network():
    network = Network()
    network.add("a", np.array([1.0, 2.0]))
    network.add("b", np.array([10.0, 20.0, 30.0]))
    network.join("a", "b", np.arange(6.0).reshape(2, 3) * 100)
    return network


def test_the_cost_of_an_assignment(network):
    assert network.cost({"a": 1, "b": 2}) == 2 + 30 + 500


def test_what_is_joined_again_adds_up_either_way_round(network):
    network.join("b", "a", np.ones((3, 2)))
    assert network.cost({"a": 0, "b": 1}) == 1 + 20 + 100 + 1
    assert np.array_equal(network.pairs["a"]["b"], network.pairs["b"]["a"].T)


def test_a_variable_joined_to_itself_costs_the_diagonal(network):
    network.join("a", "a", np.array([[5.0, 99.0], [99.0, 7.0]]))
    assert network.cost({"a": 1, "b": 0}) == 2 + 10 + 300 + 7 and network.edges() == [("a", "b")]


def test_a_restricted_network_keeps_the_costs_of_the_states_that_stay(network):
    smaller = network.restricted({"b": np.array([0, 2])})
    assert [smaller.cost({"a": 1, "b": i}) for i in range(2)] == [network.cost({"a": 1, "b": i}) for i in (0, 2)]


def test_a_copy_is_its_own(network):
    copy = network.copy()
    copy.add("a", np.ones(2))
    copy.remove("b")
    assert network.cost({"a": 0, "b": 0}) == 11 and copy.cost({"a": 0}) == 2 and copy.edges() == []
