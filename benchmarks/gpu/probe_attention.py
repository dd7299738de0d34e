"""What the kernels of fused attention return on this GPU, and what their rules' proofs say. One process for each part.

python benchmarks/gpu/probe_attention.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

SECONDS = 60  # of one part


def described(x: Any) -> Any:
    if not isinstance(x, torch.Tensor):
        return x
    return f"{str(x.dtype)[6:]} {[*x.shape]} strides {[*x.stride()]} {x.device.type}"


def shapes() -> None:
    """Outputs of all kernels, with the lengths 96 and 128, next to what fake tensors say."""
    from tutti import compat
    from tutti.check.samples.attention_cuda import backward_call, call
    from tutti.ops.attention_cuda import BACKWARD, FORWARD

    def outputs(forward, backward, length):
        q, k, v, grad = (torch.ones(2, 4, length, 64, device="cuda", dtype=torch.bfloat16) for _ in range(4))
        made = forward(*call(forward, q, k, v, None, False))
        back = backward(*backward_call(backward, grad, q, k, v, None, False, made))
        return [[described(x) for x in found] for found in (made, back)]

    for length in (96, 128):
        for forward, backward in zip(FORWARD, BACKWARD, strict=True):
            try:
                real = outputs(forward, backward, length)
                with compat.fake_mode():
                    fake = outputs(forward, backward, length)
                print(f"{forward}, {length}: {'as fake' if real == fake else ''}")
                for at, (ours, theirs) in enumerate(zip(real, fake, strict=True)):
                    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
                        if a != b or at + i < 2:
                            print(f"   {('out', 'grad')[at]} {i}: {a}" + ("" if a == b else f"  FAKE {b}"))
            except Exception:
                print(f"{forward}, {length}: {traceback.format_exc(limit=-2)}", flush=True)
    torch.cuda.synchronize()


def widths() -> None:
    """Whether a kernel takes values of half the width, and is right then: error against the formula."""
    from tutti.check.samples.attention_cuda import call
    from tutti.ops.attention_cuda import FORWARD

    q, k, v = (torch.randn(2, 4, 128, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    exact = (q.float() @ k.float().mT / 8).softmax(-1) @ v.float()
    for forward in FORWARD:
        try:
            whole, half = (forward(*call(forward, q, k, x, None, False))[0].float() for x in (v, v[..., :32]))
            errors = (whole - exact).abs().max().item(), (half - exact[..., :32]).abs().max().item()
            print(f"{forward}: error of the whole {errors[0]:.2g}, of half the width {errors[1]:.2g}")
        except Exception as error:
            print(f"{forward}: half the width raises {str(error).splitlines()[0][:200]}")


def proof(number: int, examples: int) -> None:
    """The proof of one operator's rule."""
    from tutti.check.machine import prove
    from tutti.check.samples.sample import SAMPLES
    from tutti.ops.attention_cuda import BACKWARD, FORWARD

    cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    target = [*FORWARD, *BACKWARD, cpu][number]
    report = prove(target, SAMPLES[target], examples)
    print(f"{target}: {report.cases} cases of {report.samples} samples right; needless: {dict(report.needless)}; "
          f"needlessly: {report.needlessly_forbidden}; forbidden and wrong: {dict(report.strict)}")  # fmt: skip


def main() -> None:
    parts = {"shapes": ("shapes()", {}), "widths": ("widths()", {})}
    parts |= {f"proof {n}": (f"proof({n}, 10)", {}) for n in range(7)}
    parts["proof 5, blocking"] = ("proof(5, 10)", {"CUDA_LAUNCH_BLOCKING": "1"})

    def one(name: str) -> dict[str, Any]:
        code, more = parts[name]
        begin = time.monotonic()
        command = [sys.executable, "-X", "faulthandler", "-c", f"import probe_attention; probe_attention.{code}"]
        path = os.pathsep.join([os.path.dirname(__file__), os.environ.get("PYTHONPATH", "")])
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS,
                                  env={**os.environ, **more, "PYTHONPATH": path})  # fmt: skip
            code, said, errors = done.returncode, done.stdout, done.stderr
        except subprocess.TimeoutExpired as error:
            code, said, errors = "too slow", str(error.stdout or ""), str(error.stderr or "")
        print(f"--- {name}: {code}, {time.monotonic() - begin:.0f} s\n{said[-3000:]}{errors[-3000:] if code else ''}",
              flush=True)  # fmt: skip
        return {"code": code, "said": said[-3000:], "errors": errors[-1500:] if code else ""}

    with ThreadPoolExecutor(len(parts)) as pool:
        print(json.dumps(dict(zip(parts, pool.map(one, parts), strict=True))))


if __name__ == "__main__":
    main()
