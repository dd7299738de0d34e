"""Orders are topological and move no more than needed."""

import operator

import torch
from torch import fx

from tutti.ir.step_graph import UPDATE
from tutti.lower.collectives import all_reduce
from tutti.lower.overlap.order import arrange, collectives_together, sort


def chain():
    graph = fx.Graph()
    x = graph.placeholder("x")
    a, b = graph.call_function(abs, (x,)), graph.call_function(abs, (x,))
    c = graph.call_function(max, (a, b))
    graph.output((c,))
    return graph, (x, a, b, c)


def test_sort_moves_a_node_behind_what_it_reads():
    graph, (x, a, b, c) = chain()
    arrange([x, c, a, b, *list(graph.nodes)[-1:]])
    sort(graph)
    graph.lint()
    assert list(graph.nodes)[:-1] == [x, a, b, c]


def test_a_sorted_graph_stays_as_it_is():
    graph, nodes = chain()
    sort(graph)
    assert tuple(graph.nodes)[:-1] == nodes


def test_collectives_wait_for_those_before_them():
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    calls = []
    for tensor in (x, y):
        first = graph.call_function(all_reduce, (tensor, "dp", "sum"))
        double = graph.call_function(abs, (first,))
        calls += [first, double, graph.call_function(all_reduce, (double, "dp", "sum"))]
    graph.output(tuple(calls))
    for node in calls:
        node.meta["phase"] = UPDATE
    first, second = (False, 0), (False, 1)
    assert collectives_together(graph) == {calls[0]: first, calls[3]: first, calls[2]: second, calls[5]: second}
    graph.lint()
    assert [n for n in graph.nodes if n.target is all_reduce] == [calls[0], calls[3], calls[2], calls[5]]


def test_without_an_update_nothing_moves():
    graph, nodes = chain()
    assert collectives_together(graph) == {} and tuple(graph.nodes)[:-1] == nodes


def test_what_waits_for_updated_parameters_stands_apart():
    graph = fx.Graph()
    p, g, h, m, v, step, lr = map(graph.placeholder, ("p", "g", "h", "m", "v", "step", "lr"))
    new = graph.call_function(torch.ops.tutti.adam.default, (p, g, m, v, step, lr))
    part = graph.call_function(operator.getitem, (new, 0))
    gathered = graph.call_function(all_reduce, (part, "dp", "sum"))
    gradient = graph.call_function(all_reduce, (h, "dp", "sum"))
    graph.output((gathered, gradient))
    for node in graph.nodes:
        node.meta["phase"] = UPDATE
    assert collectives_together(graph) == {gradient: (False, 0), gathered: (True, 0)}
    assert part.prev is new, "a part stays behind what makes it"
