"""llama.cpp as a peer of `serve.py` and `compress_speed.py`.

    python serve_llama.py FILE THREADS

FILE: a model in GGUF. Reads a load for each turn, a line [[prompt, number of tokens], ...] with as many tokens for each
prompt, and answers with [seconds to the first token of each, seconds, CPU seconds after the first tokens].
"""

import json
import os
import sys
import time
from typing import Any


def main(path: str, threads: str) -> None:
    answers = os.fdopen(os.dup(1), "w")  # the library prints to stdout
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(1, 2)
    import llama_cpp as api
    import numpy as np

    api.llama_backend_init()
    model = api.llama_model_load_from_file(path.encode(), api.llama_model_default_params())
    words = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))

    def decode(context: Any, batch: Any, rows: list[tuple[int, int, int, bool]]) -> list[int]:
        """The next tokens. Rows are of a token, its position, its sequence, and whether what follows is wanted."""
        batch.n_tokens = len(rows)
        for i, (token, at, sequence, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, at, 1, wanted
            batch.seq_id[i][0] = sequence
        if api.llama_decode(context, batch):
            raise RuntimeError("llama_decode failed")
        logits = (api.llama_get_logits_ith(context, i) for i, row in enumerate(rows) if row[3])
        return [int(np.ctypeslib.as_array(x, (words,)).argmax()) for x in logits]

    for line in sys.stdin:
        load = json.loads(line)
        options = api.llama_context_default_params()
        options.n_threads = options.n_threads_batch = int(threads)
        options.n_seq_max, options.n_batch, options.n_ubatch = len(load), 2048, 512
        options.n_ctx = len(load) * -(-max(len(x) + n for x, n in load) // 256) * 256
        context, batch = api.llama_init_from_model(model, options), api.llama_batch_init(2048, 0, 1)
        begin = time.perf_counter()
        tokens = []
        for i, (prompt, _) in enumerate(load):
            tokens += decode(context, batch, [(x, at, i, at + 1 == len(prompt)) for at, x in enumerate(prompt)])
        first, cpu = time.perf_counter() - begin, time.process_time()
        for step in range(load[0][1] - 1):
            tokens = decode(context, batch, [(x, len(load[i][0]) + step, i, True) for i, x in enumerate(tokens)])
        print(json.dumps([first, time.perf_counter() - begin, time.process_time() - cpu]), file=answers, flush=True)
        api.llama_batch_free(batch)
        api.llama_free(context)


if __name__ == "__main__":
    main(*sys.argv[1:])
