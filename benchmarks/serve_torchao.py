"""torchao with `generate` of transformers as a peer of `compress_speed.py`.

    python serve_torchao.py MODEL KIND THREADS

Quantizes the transformers model in MODEL: int8 (weights), int8-dynamic (and activations) or int4 (a scale for 64
inputs). Then answers as `serve_llama.py` does.
"""

import json
import os
import sys
import time


def config_of(kind: str):
    from torchao import quantization

    if kind == "int8":
        return quantization.Int8WeightOnlyConfig()
    if kind == "int8-dynamic":
        return quantization.Int8DynamicActivationInt8WeightConfig()
    from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig

    return PrototypeInt4WeightOnlyConfig(group_size=64)


def main(model_folder: str, kind: str, threads: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import torch
    from torchao.quantization import quantize_
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(int(threads))
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.bfloat16).eval()
    quantize_(
        model, config_of(kind), filter_fn=lambda x, name: isinstance(x, torch.nn.Linear) and "lm_head" not in name
    )

    def run(ids: torch.Tensor, count: int) -> None:
        model.generate(ids, max_new_tokens=count, min_new_tokens=count, do_sample=False)

    for line in sys.stdin:
        load = json.loads(line)
        ids = torch.tensor([x for x, _ in load])
        begin, began = time.perf_counter(), time.process_time()
        run(ids, 1)
        first, cpu = time.perf_counter() - begin, time.process_time() - began
        run(ids, load[0][1])
        whole = time.perf_counter() - begin - first
        print(json.dumps([first, whole, time.process_time() - began - 2 * cpu]), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
