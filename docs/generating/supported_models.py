"""The models that are tested under parallel plans, and those that the engine serves, from the tables of the tests."""

from __future__ import annotations

import contextlib
import io
import re
import sys
import warnings
from collections.abc import Iterator
from types import ModuleType

from generating.page import NOTE, ROOT, escaped, table

LIBRARIES = "transformers", "diffusers", "peft"
PLANS = {"*": "every plan", "pp2": "pipelines"}


@contextlib.contextmanager
def tests() -> Iterator[None]:
    """Modules of the tests can be imported, and say nothing."""
    folders = [str(ROOT / "tests"), str(ROOT / "tests/proofs")]
    sys.path[:0] = folders
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for folder in folders:
            sys.path.remove(folder)


def models_page() -> str:
    with tests():
        import test_any_model
        import test_more_models
        import test_trainer_families

        import models
        import more_models

        at_random, by_name = tested(models), tested(more_models)
        refused = [
            (f"`{model}`", PLANS.get(plan, plan), escaped(why))
            for (model, plan), why in test_more_models.REFUSED.items()
        ]
        trainer = ", ".join(f"`{name}`" for name in test_trainer_families.FAMILIES)
        served = serving()
    devices = ", ".join(map(str, test_any_model.DEVICES))
    settings = ", ".join(f"`{name}`" for name in test_more_models.SETTINGS)
    head = "name in the tests", "class", "library"
    return (
        f"{NOTE}\n# Supported models\n\n"
        "Any model that can be [captured](../guide/capture.md) trains under a plan. The models on this page are "
        "tested, tiny and with random weights. A model that is not on it is not refused for that.\n\n"
        "## Training\n\n"
        f"{len(at_random)} models train under random plans on {devices} devices as on one "
        f"(`tests/proofs/test_any_model.py`):\n\n{table(head, at_random)}\n"
        f"{len(by_name)} more train as in a loop of plain PyTorch under {settings}, where `random` are random plans on "
        f"so many devices (`tests/proofs/test_more_models.py`):\n\n{table(head, by_name)}\n"
        f"`tutti.Trainer` trains {trainer} under the plan that it finds, on two processes "
        "(`tests/proofs/test_trainer_families.py`).\n\n"
        "### Refused in training\n\nA `ValueError` gives the reason. Of the models above:\n\n"
        + table(("name in the tests", "under", "reason"), refused)
        + "\n[Capture](../guide/capture.md) says what no model may do, such as to branch on values of activations "
        f"(`.item()`, `x[mask]`).\n\n## Serving\n\n{served}"
    )


def tested(module: ModuleType) -> list[tuple[str, str, str]]:
    """Name, class and library of each model of a table."""
    kinds = {name: type(module.case(name)[0]) for name in module.MODELS}
    return [
        (f"`{name}`", f"`{kind.__name__}`", library if library in LIBRARIES else "plain PyTorch")
        for name, kind in kinds.items()
        for library in [kind.__module__.partition(".")[0]]
    ]


def serving() -> str:
    """What the engine serves and refuses."""
    import test_serving
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

    import encoder_models
    from tutti.serve.cache import attention, families, logits

    def classes(name: str) -> str:
        class_names = CLASSES[test_serving.FAMILIES[name]().model_type]
        return f"`{class_names if isinstance(class_names, str) else class_names[0]}`"

    def plans(name: str) -> str:
        more = test_serving.PLANS if name in test_serving.PLANNED else ["tp2"] if name in test_serving.OTHERS else []
        return ", ".join(f"`{plan}`" for plan in ("single", *more))

    rows = [(name, classes(name), plans(name)) for name in test_serving.FAMILIES]
    encoders = [(name, f"`{type(make()).__name__}`") for name, make in encoder_models.FAMILIES.items()]
    encoders.append(("LLaVA, images", f"`{type(encoder_models.llava()).__name__}`"))
    own = ", ".join(f"`{name}`" for name in families.FORWARDS)
    reasons = [re.sub(r"\{\}", "...", text) for text in logits.REFUSALS.values()]
    return (
        "The engine takes models whose attention goes through the attention interface of `transformers`, and "
        f"{own}, whose attention is their own. Served tokens equal those of `generate` for {len(rows)} decoders "
        f"(`tests/proofs/test_serving.py`):\n\n{table(('family', 'class', 'tested under'), rows)}\n"
        "The same holds for models with an encoder, of which T5 and Whisper are tested under plans "
        f"(`tests/serve/test_encoders.py`):\n\n{table(('family', 'class'), encoders)}\n"
        "### Refused by the engine\n\n"
        "When it is made, the engine compares its logits with those of the model's own forward pass, and refuses a "
        "model that it would serve wrongly. It refuses a model whose attention cannot be paged, with one of these "
        "reasons:\n\n"
        + "".join(f"- {escaped(text)}\n" for text in reasons)
        + "".join(f"- a layer {escaped(text)}\n" for text in attention.REFUSALS.values())
        + "\nKinds of layers that are served are "
        + " and ".join(f"`{kind}`" for kind in logits.KINDS)
        + "; a kind whose name contains "
        + ", ".join(f"`{part}`" for part in logits.STATES)
        + " keeps a state. Tests refuse "
        + "; ".join(test_serving.REFUSED)
        + ".\n"
    )
