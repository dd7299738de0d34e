"""A split that is followed through a step: everything of the sequence lies along it, weights do not."""

import torch

import tutti
import zoo
from tutti.plan.layouts.choice import Choice
from tutti.plan.layouts.follow import follow
from tutti.plan.layouts.layout import Split
from tutti.plan.layouts.problem import problem_of

BATCH = 12


def problem():
    model = zoo.llama()
    return problem_of(tutti.capture(model, zoo.tokens(BATCH), torch.optim.SGD(model.parameters(), lr=0.1)))


def test_the_sequence_is_followed_through_forward_and_backward_pass():
    of = problem()
    choices = follow(of, {("batch:input_ids", 0): Split(1), ("batch:labels", 0): Split(1)}, 4)
    path = "model.layers.*."
    assert choices["model.embed_tokens/forward/embedding"] == Choice("b")
    assert choices[path + "mlp.up_proj/forward/mm"] == Choice("m", BATCH), "tokens of a sequence lie side by side"
    attention = "_scaled_dot_product_flash_attention_for_cpu"
    assert choices[f"{path}self_attn/forward/{attention}"] == Choice("s")
    assert choices[f"{path}self_attn/backward/{attention}_backward"] == Choice("s")
    assert choices[path + "mlp.up_proj/backward/mm"] == Choice("k", BATCH), "the gradient of the weight is a sum"
    assert not set(choices) & of.weights
    assert not any(of.operators[label].phase == "update" for label in choices)


def test_what_cannot_follow_ends_the_trail():
    model = torch.nn.LSTM(8, 8, batch_first=True)
    x = torch.randn(4, 6, 8)
    graph = tutti.capture(
        model, (x,), torch.optim.SGD(model.parameters(), lr=0.1), lambda m, b: m(*b)[0].square().mean()
    )
    of = problem_of(graph)
    choices = follow(of, {("batch:0", 0): Split(1)}, 2)
    layers = [label for label in of.operators if "lstm_layer" in label]
    assert layers and not set(layers) & set(choices)
