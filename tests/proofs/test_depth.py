"""What a level compiles does not depend on how many layers a model has."""

from __future__ import annotations

import pytest
import torch
import transformers

from cases import crossed
from tutti.analysis.passes import improve
from tutti.analysis.segments import part_of, segments
from tutti.lower.shard import shard
from tutti.plan.plan import Plan
from tutti.tracing.capture import capture


def llama(depth):
    config = transformers.LlamaConfig(hidden_size=64, num_hidden_layers=depth, num_attention_heads=4,
                                      intermediate_size=96, vocab_size=128)  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def gpt2(depth):
    config = transformers.GPT2Config(n_embd=64, n_layer=depth, n_head=4, vocab_size=128, n_positions=32)
    return transformers.GPT2LMHeadModel(config)


def bert(depth):
    config = transformers.BertConfig(hidden_size=64, num_hidden_layers=depth, num_attention_heads=4,
                                     intermediate_size=96, vocab_size=128)  # fmt: skip
    return transformers.BertForMaskedLM(config)


def functions(model: torch.nn.Module, level: str, dtype: torch.dtype) -> tuple[int, int]:
    """How many are called in a step, and how many have to be compiled."""
    ids = torch.zeros(2, 16, dtype=torch.int64)
    optimizer = torch.optim.AdamW(model.parameters())
    masters = dtype != torch.float32
    step = capture(
        model.to(dtype).train(),
        {"input_ids": ids, "labels": ids},
        optimizer,
        clip_norm=1.0,
        fp32_master_weights=masters,
    )
    step = step.keep([name for name in step.outputs if name not in step.gradient_names])
    program = improve(shard(step, Plan({"dp": 1}), 0), level)
    structures = [part_of(part).structure for part in segments(program.graph, level)]
    return len(structures), len(set(structures))


QUICK = [(llama, "O2", torch.float32)]


@pytest.mark.parametrize(
    "make, level, dtype", crossed([llama, gpt2, bert], ["O1", "O2"], [torch.float32, torch.bfloat16], quick=QUICK)
)
def test_functions_do_not_depend_on_depth(make, level, dtype):
    with torch.device("meta"):
        few, many = (functions(make(depth), level, dtype) for depth in (4, 12))
    assert few[1] == many[1] < many[0] and few[0] < many[0]
