"""TRL as a peer of `align.py`: a trainer that does a step for each line on stdin.

    python align_trl.py KIND STEPS FOLDER

It answers with [seconds, CPU seconds, loss, peak bytes of the process].
"""

import json
import os
import resource
import sys


def main(kind: str, steps: str, folder: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import trl
    from datasets import Dataset

    import align

    def tell(measured: list[float]) -> None:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(json.dumps([*measured, peak]), file=answers, flush=True)

    words = align.tokenizer()
    plain = {"bf16": False, "use_cpu": True, "gradient_checkpointing": False}
    arguments = {**align.options(kind, folder, int(steps)), **plain}
    shared = {"train_dataset": Dataset.from_list(align.rows(kind, words)), "processing_class": words,
              "callbacks": [align.Paced(sys.stdin.readline, tell)]}  # fmt: skip
    if kind == "SFT":
        trainer = trl.SFTTrainer(align.model(), args=trl.SFTConfig(**arguments), **shared)
    elif kind == "DPO":
        trainer = trl.DPOTrainer(
            align.model(), ref_model=align.model(), args=trl.DPOConfig(**arguments, loss_type=["sigmoid"]), **shared
        )
    else:
        trainer = trl.GRPOTrainer(align.model(), align.reward, args=trl.GRPOConfig(**arguments), **shared)
    trainer.train()


if __name__ == "__main__":
    main(*sys.argv[1:])
