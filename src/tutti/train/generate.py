"""The verb `tutti generate`: continue a text with a trained model."""

from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers import logging as transformers_logging
from transformers.initialization import no_init_weights

from tutti.checkpoint.folder import CHECKPOINTS, MANIFEST, latest
from tutti.checkpoint.reader import CheckpointReader
from tutti.exec.sharded_tensor import ShardedTensor
from tutti.tracing.optimizers.marks import EMA


def generate(
    run: Annotated[str, tyro.conf.Positional],
    prompt: str = "def ",
    tokens: int = 200,
    temperature: float = 0.7,
    seed: int = 0,
) -> None:
    """Continue a text with a trained model, and print both.

    Args:
        run: Folder of a run, whose newest checkpoint is used, or of a checkpoint or transformers model.
        prompt: The text to continue.
        tokens: Number of tokens to generate, unless the model ends the text before.
        temperature: Sampling temperature. 0 takes the most likely token.
        seed: Random seed of sampling.
    """
    print(continue_text(model_folder(run), prompt, tokens, temperature, seed))


def continue_text(folder: Path, prompt: str, tokens: int, temperature: float, seed: int) -> str:
    """The prompt with its continuation."""
    if not prompt:
        raise ValueError("the prompt is empty; give at least one character to continue")
    tokenizer, model = AutoTokenizer.from_pretrained(folder, trust_remote_code=False), load_model(folder)
    torch.manual_seed(seed)
    inputs = tokenizer(prompt, return_tensors="pt").to(model.device)
    choice = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {}
    ids = model.generate(
        input_ids=inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        max_new_tokens=tokens,
        use_cache=True,
        **choice,
    )
    return tokenizer.decode(ids[0], skip_special_tokens=True)


def load_model(folder: Path) -> Any:
    """The model in a folder, ready for inference: on the GPU, or in float32 on the CPU."""
    transformers_logging.disable_progress_bar()
    on_gpu = torch.cuda.is_available()
    if (folder / MANIFEST).exists():
        model = stored_model(folder) if on_gpu else stored_model(folder).float()
    else:
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype="auto" if on_gpu else torch.float32, trust_remote_code=False
        )
    return model.to("cuda" if on_gpu else "cpu").eval()


def stored_model(folder: Path) -> Any:
    """The model in a checkpoint, with its own dtypes."""
    stored = CheckpointReader(folder)
    with no_init_weights():
        model: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder, trust_remote_code=False))
    model.tie_weights()
    wanted = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if (key := key_of(stored, name)) is not None:
            tensor.data = tensor.data.to(stored.tensors[key].dtype)
            wanted[key] = ShardedTensor.whole(tensor.data)
    if missing := {name for name, _ in model.named_parameters()} - {key.partition(":")[2] for key in wanted}:
        raise ValueError(f"{folder} has no tensor 'param:{min(missing)}', which its config.json requires")
    stored.load(wanted)
    return model


def key_of(stored: CheckpointReader, name: str) -> str | None:
    """The tensor of a checkpoint that a model takes: the average of a parameter if there is one."""
    return next((key for kind in (EMA, "param", "buffer") if (key := f"{kind}:{name}") in stored.tensors), None)


def model_folder(run: str | Path) -> Path:
    """The newest complete checkpoint of a run, or the folder itself if it is a model."""
    folder = Path(run)
    if (folder / "config.json").exists():
        return folder
    newest = latest(folder / CHECKPOINTS, say=print) or latest(folder, say=print)
    if newest is None:
        raise ValueError(f"no complete checkpoint in {folder}; give the folder of a run (the `out` of its config)")
    return newest
