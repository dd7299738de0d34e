"""A tokenizer with all special tokens, and a way to train a tiny model with a task on two virtual devices."""

import json

import pytest
import torch
import transformers
from tokenizers import processors

import tutti
from tiny_models import VOCABULARY
from tutti.data.rows import Numbered
from tutti.data.tokenizer import train_tokenizer

WORDS = [
    "the", "a", "red", "blue", "green", "small", "big", "cat", "dog", "bird", "runs", "sings", "sleeps", "in", "on",
    "under", "tree", "house", "river",
]  # fmt: skip


def sentences(count, seed=0, words=6):
    draw = torch.Generator().manual_seed(seed)
    rows = torch.randint(0, len(WORDS), (count, words), generator=draw).tolist()
    return [" ".join(WORDS[i] for i in row) for row in rows]


@pytest.fixture(scope="session")
def tokenizer():
    """Byte-level BPE with `[CLS] a [SEP] b [SEP]`, sentinels and markers of the middle."""
    tokenizer = train_tokenizer(sentences(200), 320)
    tokenizer.add_tokens([f"<extra_id_{i}>" for i in range(8)], special_tokens=True)
    tokenizer.add_tokens(["<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"], special_tokens=True)
    tokenizer.add_special_tokens(
        {"mask_token": "[MASK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]"}
    )
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", tokenizer.cls_token_id), ("[SEP]", tokenizer.sep_token_id)],
    )
    tokenizer.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    tokenizer.model_max_length = 32
    return tokenizer


@pytest.fixture(scope="session")
def processor(tmp_path_factory):
    """A processor of speech at 1000 samples a second, and of letters."""
    file = tmp_path_factory.mktemp("ctc") / "vocab.json"
    file.write_text(json.dumps({token: i for i, token in enumerate(VOCABULARY)}))
    extractor = transformers.Wav2Vec2FeatureExtractor(sampling_rate=1000, return_attention_mask=True)
    return transformers.Wav2Vec2Processor(extractor, transformers.Wav2Vec2CTCTokenizer(str(file)))


@pytest.fixture
def train():
    """`train(task, model, rows, processor)`: losses of some steps at O0 on two virtual devices."""

    def run(task, model, rows, processor, steps=20, batch=8, lr=1e-2, **options):
        task.check(model, processor, rows)
        features, collate = Numbered(task.prepare(rows, processor)), task.collator(processor)
        batches = [
            collate([features[(s * batch + r) % len(features)] for r in range(batch)])
            for s in range(min(steps, max(1, len(features) // batch)))
        ]
        step = tutti.parallelize(
            model, torch.optim.AdamW(model.parameters(), lr), batches[0], loss=task.loss, cluster="cpu:2", plan="dp2",
            level="O0", **options,
        )  # fmt: skip
        return [step(batches[s % len(batches)]).item() for s in range(steps)]

    return run
