"""Scores of text: perplexity, and BLEU and ROUGE by the libraries `sacrebleu` and `rouge_score`."""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from tutti.train.tasks.scores import IGNORED

ROUGE = ("rouge1", "rouge2", "rougeL")


def perplexity(logits: ArrayLike, labels: ArrayLike, shift: int = 1) -> float:
    """exp of the mean negative log-likelihood of labels that are not -100.

    logits: (rows, tokens, vocabulary). labels: (rows, tokens).
    shift: how many positions before its label a prediction stands: 1 for causal models, 0 for masked ones.

    Raises ValueError if no label counts.
    """
    log_weights, wanted = np.asarray(logits, np.float64), np.asarray(labels)
    if shift:
        log_weights, wanted = log_weights[:, :-shift], wanted[:, shift:]
    chosen = wanted != IGNORED
    if not chosen.any():
        raise ValueError("there is no label to compare with")
    log_weights, wanted = log_weights[chosen], wanted[chosen]
    high = log_weights.max(-1, keepdims=True)
    total = np.log(np.exp(log_weights - high).sum(-1)) + high[:, 0]
    return math.exp((total - log_weights[np.arange(len(wanted)), wanted]).mean())


def bleu(predictions: Sequence[str], references: Sequence[str] | Sequence[Sequence[str]], **options: Any) -> float:
    """BLEU of a corpus in [0, 100] (Papineni et al. 2002), as sacrebleu computes it (Post 2018).

    references: one text, or several, for each prediction. options: options of `sacrebleu.corpus_bleu`, such as
    `tokenize="zh"`.

    Raises ValueError if there are not as many references as predictions, or none; ImportError without sacrebleu.
    """
    several = _references(predictions, references)
    most = max(map(len, several))
    streams = [[texts[min(i, len(texts) - 1)] for texts in several] for i in range(most)]
    return float(library("sacrebleu").corpus_bleu(list(predictions), streams, **options).score)


def rouge(predictions: Sequence[str], references: Sequence[str] | Sequence[Sequence[str]],
          stemmer: bool = False) -> dict[str, float]:  # fmt: skip
    """ROUGE-1, ROUGE-2 and ROUGE-L in [0, 1]: the mean F-measure over texts (Lin 2004), as rouge_score computes it.

    Of several references, the one with the best F-measure counts. stemmer: compare stems of words.

    Raises ValueError if there are not as many references as predictions, or none; ImportError without rouge_score.
    """
    several = _references(predictions, references)
    scorer = library("rouge_score.rouge_scorer").RougeScorer(ROUGE, use_stemmer=stemmer)
    scores = [
        scorer.score_multi(list(texts), prediction) for prediction, texts in zip(predictions, several, strict=True)
    ]
    return {name: sum(x[name].fmeasure for x in scores) / len(scores) for name in ROUGE}


def _references(predictions: Sequence[str], references: Sequence[str] | Sequence[Sequence[str]]) -> list[list[str]]:
    if len(predictions) != len(references) or not predictions:
        raise ValueError(f"there are {len(predictions)} predictions and {len(references)} references")
    return [[x] if isinstance(x, str) else list(x) for x in references]


def library(name: str) -> Any:
    """A module of a package of the extra `eval`. Raises ImportError without it, with what to install."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        package = name.partition(".")[0]
        raise ModuleNotFoundError(f"there is no package {package}; pip install 'tutti[eval]'", name=package) from error
