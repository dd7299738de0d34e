"""The tasks by name."""

from __future__ import annotations

from difflib import get_close_matches
from importlib import import_module
from typing import Any

from tutti.train.tasks.task import Task

TASKS = {
    "causal-lm": "language.causal_lm:CausalLM",
    "masked-lm": "language.masked_lm:MaskedLM",
    "span-corruption": "language.span_corruption:SpanCorruption",
    "fill-in-the-middle": "language.fill_in_the_middle:FillInTheMiddle",
    "seq2seq": "language.seq2seq:Seq2Seq",
    "sequence-classification": "language.sequence_classification:SequenceClassification",
    "token-classification": "language.token_classification:TokenClassification",
    "multiple-choice": "language.multiple_choice:MultipleChoice",
    "question-answering": "language.question_answering:QuestionAnswering",
    "image-classification": "image_classification:ImageClassification",
    "masked-image": "masked_image:MaskedImage",
    "contrastive": "contrastive:Contrastive",
    "diffusion": "diffusion:Diffusion",
    "speech-ctc": "speech_ctc:SpeechCTC",
    "speech-pretraining": "speech_pretraining:SpeechPretraining",
}
"""Name -> module and class, imported on first use."""


def get_task(name: str, **options: Any) -> Task:
    """A task by name. The options are the fields of its class.

    >>> get_task("masked-lm", probability=0.2).probability
    0.2

    Raises ValueError for an unknown name or option; it names the nearest.
    """
    if name not in TASKS:
        near = get_close_matches(name, TASKS, 1)
        hint = f"; the nearest is {near[0]!r}" if near else ""
        raise ValueError(f"there is no task {name!r}{hint}; the tasks are {', '.join(TASKS)}")
    module, _, kind = TASKS[name].partition(":")
    return getattr(import_module(f"tutti.train.tasks.{module}"), kind)().but(**options)
