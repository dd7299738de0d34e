"""Peak memory and time of `tutti compress` for a model of the shape of Llama 2 7B, with random weights in bfloat16.

    python benchmarks/compress_7b.py --recipe int4                    # all 32 blocks: 13.5 GB of files
    python benchmarks/compress_7b.py --recipe int4-gptq --layers 2    # blocks have the same peak

The limit to be held is 6 GB. Needs room on the disk for the files, and for the compressed ones.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig

LIMIT = 6e9
SIZES = dict(vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_attention_heads=32)


def write(folder: Path, layers: int) -> None:
    """The files of the model, one for each block."""
    config = LlamaConfig(**SIZES, num_hidden_layers=layers, dtype="bfloat16", architectures=["LlamaForCausalLM"])
    config.save_pretrained(folder)
    h, f, vocabulary = config.hidden_size, config.intermediate_size, config.vocab_size
    draw, names = torch.Generator().manual_seed(0), {}

    def file(name: str, shapes: dict[str, tuple[int, ...]]) -> None:
        tensors = {}
        for key, shape in shapes.items():
            x = torch.empty(shape, dtype=torch.bfloat16)
            tensors[key] = x.normal_(0, 0.02, generator=draw) if len(shape) > 1 else x.fill_(1)
            names[key] = name
        save_file(tensors, folder / name, {"format": "pt"})

    file("outside.safetensors", {"model.embed_tokens.weight": (vocabulary, h), "model.norm.weight": (h,),
                                 "lm_head.weight": (vocabulary, h)})  # fmt: skip
    for i in range(layers):
        own = {f"self_attn.{x}_proj": (h, h) for x in "qkvo"}
        own |= {"mlp.gate_proj": (f, h), "mlp.up_proj": (f, h), "mlp.down_proj": (h, f)}
        own |= {"input_layernorm": (h,), "post_attention_layernorm": (h,)}
        file(f"block-{i}.safetensors", {f"model.layers.{i}.{x}.weight": shape for x, shape in own.items()})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))


CODE = """
import sys, torch
from tutti.compress import compress
folder, out, recipe, rows, length = sys.argv[1:]
torch.set_num_threads(1)
draw = torch.Generator().manual_seed(1)
ids = torch.randint(32000, (int(rows), int(length)), generator=draw)
show = lambda done, total, path: print(f"block {done} of {total}", flush=True)
made = compress(folder, recipe, [{"input_ids": x[None]} for x in ids], out=out, progress=show)
print(str(made.report).splitlines()[-1])
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="int4")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--folder", help="where the files are written; a temporary folder by default")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as place:
        source, out = Path(place) / "source", Path(place) / "out"
        source.mkdir()
        write(source, args.layers)
        before = sum(x.stat().st_size for x in source.glob("*.safetensors"))
        begun = time.perf_counter()
        subprocess.run(
            [sys.executable, "-c", CODE, source, out, args.recipe, str(args.rows), str(args.length)], check=True
        )
        seconds = time.perf_counter() - begun
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
        after = sum(x.stat().st_size for x in out.glob("*.safetensors"))
        shutil.rmtree(source)
    print(json.dumps({"recipe": args.recipe, "layers": args.layers, "bytes": before, "compressed_bytes": after,
                      "peak_bytes": peak, "within_limit": peak <= LIMIT, "seconds": round(seconds, 1)}))  # fmt: skip


if __name__ == "__main__":
    main()
