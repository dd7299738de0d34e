"""Actions: every message is sent once, received where it is read, and dropped behind its last reader."""

from collections import Counter

import pytest
import torch

import tutti
import zoo
from models import MODELS
from pipelines import random_stages
from tutti.lower.parts.actions import Message, actions_of, had, orders
from tutti.lower.parts.cut import cut
from tutti.lower.variants.unroll import unroll
from tutti.plan.pipeline.schedule import CHUNKED, IN_V, NAMES, PAIRED, schedule_of


def random_parts(name, p, m, seed):
    model = zoo.gpt2(attention=0.0)
    graph = tutti.capture(model, zoo.tokens(), torch.optim.AdamW(model.parameters()), clip_norm=1.0)
    stages = 2 * p if name in ("interleaved", *IN_V) else p
    if name == CHUNKED:
        graph = unroll(graph, 2)
    schedule = schedule_of(name, p, stages, m, sequence_chunks=graph.sequence_chunks)
    return cut(graph, random_stages(graph, stages, seed), schedule.split), schedule


@pytest.mark.parametrize("name", NAMES)
def test_messages_match_and_no_order_of_them_is_a_circle(name):
    cutting, schedule = random_parts(name, 3, 6, 1)
    actions = actions_of(cutting, schedule)
    sent = Counter((m, s, r) for (s, r), messages in orders(actions).items() for m in messages)
    received = Counter((m, s, d) for d, todo in enumerate(actions) for a in todo for m, s in a.receives)
    assert sent == received and set(sent.values()) == {1}
    done, going = [0] * len(actions), True  # every device waits for what it receives
    posted = set()
    while going:
        going = False
        for d, todo in enumerate(actions):
            while done[d] < len(todo) and all((m, d) in posted for m, _ in todo[done[d]].receives):
                posted |= {(m, to) for m, to in todo[done[d]].sends}
                done[d], going = done[d] + 1, True
    assert done == [len(todo) for todo in actions]


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-v", PAIRED, CHUNKED])
def test_what_is_dropped_was_there_and_nothing_is_left(name):
    cutting, schedule = random_parts(name, 2, 4, 3)
    for d, todo in enumerate(actions_of(cutting, schedule)):
        here = set()
        for action in todo:
            here |= {m for m, _ in action.receives}
            for place, microbatch in action.runs:
                outputs = cutting.parts[place].outputs
                here |= {Message(n, microbatch) for n in outputs if n.startswith("value:")}
            assert set(action.drops) <= here, f"device {d}"
            here -= set(action.drops)
        assert not here


def test_who_hears_from_a_device_knows_what_it_has_received():
    cutting, schedule = random_parts("1f1b", 2, 4, 1)
    actions = actions_of(cutting, schedule)
    received, sent = had(actions)[1, 0], orders(actions)
    counts = [received[message] for message in sent[1, 0]]
    assert counts == sorted(counts) and counts[0] > 0, "a gradient comes after what it is the gradient of"
    assert counts[-1] > counts[0] and counts[-1] <= len(sent[0, 1])


def test_an_encoder_s_output_goes_from_stage_to_stage():
    model, batch, loss = MODELS["t5"]()
    graph = tutti.capture(model, batch, torch.optim.AdamW(model.parameters()), loss)
    cutting = cut(graph, {"encoder": 0, "decoder.block.0": 1, "decoder.block.1": 2})
    actions = actions_of(cutting, schedule_of("1f1b", 3, 3, 2))
    both = [name for name, readers in cutting.readers.items() if {r.stage for r in readers if r.kind == "F"} == {1, 2}
            and cutting.makers[name].stage == 0]  # fmt: skip
    assert both, "the decoder's stages read it"
    sends = {(d, to) for d, todo in enumerate(actions) for a in todo for m, to in a.sends if m.name in both}
    assert sends == {(0, 1), (1, 2)}


def test_a_tied_parameter_is_lent_and_its_gradient_handed_on():
    model = zoo.gpt2()
    graph = tutti.capture(model, zoo.tokens(), torch.optim.AdamW(model.parameters()))
    cutting = cut(graph, {"transformer.wte": 0, "transformer.h.0": 0, "transformer.h.1": 1})
    assert cutting.borrowers == {"param:transformer.wte.weight": [1]}
    first = actions_of(cutting, schedule_of("1f1b", 2, 2, 4))[0][0]
    assert first.place is None and [(m.name, to) for m, to in first.sends] == [("param:transformer.wte.weight", 1)]
