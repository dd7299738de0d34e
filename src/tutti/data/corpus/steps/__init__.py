"""The steps of a pipeline, by the names that configs give them."""

from tutti.data.corpus.steps.duplicates import Duplicates, NearDuplicates
from tutti.data.corpus.steps.extract import Extract
from tutti.data.corpus.steps.language import Language
from tutti.data.corpus.steps.licence import Licence
from tutti.data.corpus.steps.lines import Lines
from tutti.data.corpus.steps.mix import Mix
from tutti.data.corpus.steps.perplexity import Perplexity
from tutti.data.corpus.steps.phrases import Decontaminate, Words
from tutti.data.corpus.steps.pii import MaskPii
from tutti.data.corpus.steps.quality import Quality
from tutti.data.corpus.steps.repair import Repair
from tutti.data.corpus.steps.rules import Rules
from tutti.data.corpus.steps.secrets import Secrets
from tutti.data.corpus.steps.step import Step

STEPS: dict[str, type[Step]] = {
    step.kind: step
    for step in (
        Extract, Repair, Language, Lines, Rules, MaskPii, Secrets, Licence, Words, Decontaminate, Perplexity, Quality,
        Duplicates, NearDuplicates, Mix,
    )
}  # fmt: skip

__all__ = [
    "STEPS", "Decontaminate", "Duplicates", "Extract", "Language", "Licence", "Lines", "MaskPii", "Mix",
    "NearDuplicates", "Perplexity", "Quality", "Repair", "Rules", "Secrets", "Words",
]  # fmt: skip
