"""OpenVINO GenAI as a peer of `serve.py`, in a virtual environment of its own (`harness.Peer`).

    python serve_openvino.py MODEL FOLDER KIND [THREADS]

Converts the transformers model in MODEL into FOLDER, unless that is done, with weights of KIND: bf16, int8 (a scale for
each output) or int4 (a scale for 64 inputs; embeddings and the output layer in int8). Then reads a load for each turn,
a line [[prompt, number of tokens], ...], and answers with [seconds to the first token of each, seconds, CPU seconds
after the first tokens].
"""

import json
import os
import sys
import time
from pathlib import Path


def convert(model: str, folder: str, kind: str) -> None:
    sys.modules["torchvision"] = None  # optional, and the build that pip takes does not load beside a CPU torch
    from optimum.exporters.openvino import main_export
    from optimum.intel import OVConfig, OVWeightQuantizationConfig

    how = {
        "bf16": None,  # said so: by default, models of more than 1e9 parameters become int8
        "int8": OVWeightQuantizationConfig(bits=8, sym=True),
        "int4": OVWeightQuantizationConfig(bits=4, sym=True, group_size=64, ratio=1.0),
    }[kind]
    main_export(model, folder, task="text-generation-with-past", convert_tokenizer=False, stateful=True,
                ov_config=OVConfig(quantization_config=how) if how else OVConfig(dtype="auto"))  # fmt: skip


def main(model: str, folder: str, kind: str, threads: str = "2") -> None:
    answers = os.fdopen(os.dup(1), "w")  # libraries print to stdout
    os.dup2(2, 1)
    if not (Path(folder) / "openvino_model.xml").exists():
        convert(model, folder, kind)
    import numpy as np
    import openvino
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    scheduler.cache_size, scheduler.max_num_batched_tokens, scheduler.max_num_seqs = 1, 512, 32
    scheduler.enable_prefix_caching = False
    has_bf16 = "BF16" in openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    precision = "bf16" if has_bf16 else "f32"  # what it accepts
    properties = {
        "INFERENCE_NUM_THREADS": int(threads),
        "INFERENCE_PRECISION_HINT": precision,
        "KV_CACHE_PRECISION": precision,
    }
    pipeline = genai.ContinuousBatchingPipeline(folder, scheduler, "CPU", properties)

    def greedy(count: int) -> genai.GenerationConfig:
        config = genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = count
        config.do_sample, config.ignore_eos = False, True
        config.eos_token_id, config.stop_token_ids = 2, {2}  # it requires one
        return config

    for line in sys.stdin:
        begin, first, cpu = time.perf_counter(), 0.0, 0.0
        handles = [pipeline.add_request(i, openvino.Tensor(np.array([prompt], dtype=np.int64)), greedy(count))
                   for i, (prompt, count) in enumerate(json.loads(line))]  # fmt: skip
        while pipeline.has_non_finished_requests():
            pipeline.step()
            if not first and all(x.can_read() for x in handles):
                first, cpu = time.perf_counter() - begin, time.process_time()
        print(json.dumps([first, time.perf_counter() - begin, time.process_time() - cpu]), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
