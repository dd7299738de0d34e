"""Scores of models for classes, text and samples (the Frechet distance of features), and lm-eval's tasks."""

from tutti.extras import extra

with extra("train"):
    from tutti.train.scores.classes import accuracy, f1
    from tutti.train.scores.compute import METRICS, compute_metrics
    from tutti.train.scores.frechet import Features, frechet_distance
    from tutti.train.scores.model import score_folder
    from tutti.train.scores.text import bleu, perplexity, rouge

__all__ = [
    "METRICS",
    "Features",
    "accuracy",
    "bleu",
    "compute_metrics",
    "f1",
    "frechet_distance",
    "perplexity",
    "rouge",
    "score_folder",
]
