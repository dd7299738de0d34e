"""Tensor parallelism as found by the planner communicates what Megatron-LM's hand-written one does.

Shoeybi et al., "Megatron-LM" (2019): two all-reduces a layer forward and two backward. Korthikanti et al., "Reducing
activation recomputation" (2022): or as many pairs of reduce-scatter and all-gather, which move the same bytes.
"""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch
import transformers

import tutti
from tutti.ir.costs import flat
from tutti.lower.shard import shard
from tutti.plan.layouts.layout import Split
from tutti.plan.planner import Planner

BATCH, LENGTH, LAYERS, RANKS = 8, 1024, 4, 4


def gpt2() -> tuple[torch.nn.Module, int, int]:
    config = transformers.GPT2Config(
        n_embd=1024,
        n_layer=LAYERS,
        n_head=16,
        vocab_size=50304,
        bos_token_id=0,
        eos_token_id=0,
        loss_type="ForCausalLM",
    )
    return transformers.GPT2LMHeadModel(config).train(), 1024, 50304


def llama() -> tuple[torch.nn.Module, int, int]:
    config = transformers.LlamaConfig(
        hidden_size=2048,
        num_hidden_layers=LAYERS,
        num_attention_heads=16,
        num_key_value_heads=8,
        intermediate_size=5632,
        vocab_size=32000,
    )
    return transformers.LlamaForCausalLM(config).train(), 2048, 32000


@pytest.fixture(scope="module", params=[gpt2, llama])
def lowered(request):
    """(plan, program of rank 0, hidden size, vocabulary) of the tp4 plan on four H100s."""
    with torch.device("meta"):
        model, hidden, vocabulary = request.param()
        ids = torch.empty(BATCH, LENGTH, dtype=torch.long)
    step = tutti.capture(model, {"input_ids": ids, "labels": ids}, torch.optim.AdamW(model.parameters()))
    step = step.keep([name for name in step.outputs if name not in step.gradient_names])
    plan = Planner(step, tutti.Cluster.parse(f"h100:{RANKS}")).named("tp4")
    return plan, shard(step, plan, 0), hidden, vocabulary


def test_bytes_of_a_layer_are_those_of_four_all_reduces(lowered):
    _, program, hidden, _ = lowered
    activations = BATCH * LENGTH * hidden * 4
    all_reduce = 2 * (RANKS - 1) * activations // RANKS
    sent: dict[str, int] = defaultdict(int)
    for node in program.collectives:
        if ".*" in node.label and node.bytes > activations // 1000:  # not the gradients of norms and biases
            sent["forward" if "/forward/" in node.label else "backward"] += node.bytes
    # The first layer's input is gathered, and the last one's output scattered, outside of the layers.
    assert sent["forward"] == LAYERS * 2 * all_reduce
    assert sent["forward"] + sent["backward"] <= LAYERS * 4 * all_reduce


def test_fused_qkv_is_split_over_heads_where_it_lies(lowered):
    plan, program, _, _ = lowered
    fused = "param:transformer.h.*.attn.c_attn.weight"
    if fused in plan.inputs:
        assert plan.inputs[fused]["tp"] == Split(1, 3), "each rank has its heads of q, of k and of v"
        moved = [c for c in program.collectives if "c_attn/forward" in c.label or ".attn/forward" in c.label]
        assert moved == []
    else:
        heads = [plan.inputs[f"param:model.layers.*.self_attn.{p}_proj.weight"]["tp"] for p in "qkv"]
        assert heads == [Split(0)] * 3
        moved = [c for c in program.collectives if "self_attn/forward" in c.label]
        # The output may be gathered instead of scattering what o_proj makes of it: the same bytes.
        assert all(c.kind == "all_gather" and "attention" in c.label for c in moved) and len(moved) <= LAYERS


def test_no_tensor_of_the_size_of_all_logits(lowered):
    plan, program, _, vocabulary = lowered
    sizes = [spec.numel for node in program.graph.nodes if node.op != "output" for spec in flat(node.meta["val"])]
    assert max(sizes) < BATCH * LENGTH * vocabulary // RANKS, "nor of the size of a rank's part of them"
    head = "param:transformer.wte.weight" if "param:transformer.wte.weight" in plan.inputs else "param:lm_head.weight"
    assert plan.inputs[head]["tp"] == Split(0), "the vocabulary of the loss is split"
