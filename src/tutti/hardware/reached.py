"""What kernels reach on GPUs: published measurements, each with its source. None is fitted to the time of a step.

Products, as shares of the peak for large ones (smaller ones come in tiles and waves, `device.quantized_flops`):

| | products | grouped |
|---|---|---|
| A100 | 0.80 | 0.63 |
| H100, H200 | 0.725 | 0.55 |
| B200 | 0.49 | 0.30 |

- A100: SimuMax, a PCIe card: 0.75 of products in the layouts of a step, times the ratio of SXM to PCIe, 271 to 253;
  grouped as there.
- H100: aiconfigurator, TensorRT-LLM 1.2: 0.71 to 0.73 of 8192 rows and more. Grouped: 0.41 with routing and activation
  (vLLM 0.19, experts of 2048 x 768, 1024 rows each), 0.70 if the traffic of these is taken off; the middle.
- B200: SimuMax, means of 514 products and of 108 grouped ones.

Memory: 0.666 on a B200 and 0.75 on an A100 (SimuMax, "default" of the bandwidth: 0.91 of 1.6 TB/s on a card of 1.935);
an H100 is assumed to be like an A100.

Fused attention, over the number of keys, under a causal mask, heads of 128:

- A100: forward 0.24, 0.36, 0.46, 0.52, 0.55, 0.57 at 512, 1024, ... 16384 (aiconfigurator, vLLM 0.14, which runs
  FlashAttention-2); backward 0.49 at 4096 (SimuMax).
- H100, FlashAttention-2: forward 191, 260, 298, 319, 333, 335 TFLOP/s at the same lengths (FlashAttention-3, figure 5);
  backward 214 to 322 without a mask (figure 6), times the ratio of the forward passes with and without, 0.9.
- H100, cuDNN: forward 315, 410, 484, 518, 529, 539; backward 305, 408, 465, 499, 518, 516 without a mask, likewise.
- B200: forward 0.44 at 4096 and 0.58 at 32768, backward 0.36 to 0.42 and 0.43 to 0.48 (SimuMax, cuDNN, 64 heads).

PyTorch's fused attention is FlashAttention-2 on an A100, and cuDNN's on an H100 and a B200, if cuDNN is newer than 9.15
(`check_prefer_cudnn_attention` in aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, torch 2.11 to 2.13). Older runs
on an H100 used FlashAttention-2: "flash2", a prefix of `Device.attention`.

Sources: SimuMax, configs/system/a100_pcie.json and b200_bf16_ceperm.json (github.com/MooreThreads/SimuMax, 2026);
aiconfigurator, systems/data (github.com/ai-dynamo/aiconfigurator, 2026); SXM and PCIe cards: S. Bekman, Machine
Learning Engineering, maximum achievable matmul FLOPS; J. Shah et al., FlashAttention-3 (arXiv 2407.08608).
"""

from __future__ import annotations

from collections.abc import Mapping

from tutti.hardware.curve import Ramp


def shares(products: float, grouped: float, memory: float) -> dict[str, float]:
    """`Device.efficiency`: shares of the peak in half precision, and of the memory's bandwidth."""
    by_kind = {"memory": memory}
    for dtype in ("bfloat16", "float16"):
        by_kind |= {dtype: products, f"grouped {dtype}": grouped}
    return by_kind


A100, HOPPER, B200 = shares(0.8, 0.63, 0.75), shares(0.725, 0.55, 0.75), shares(0.49, 0.3, 0.666)

FLASH_A100: Mapping[str, Ramp] = {"forward": Ramp(0.59, 580), "backward": Ramp(0.55, 500)}
FLASH_HOPPER: Mapping[str, Ramp] = {
    "forward": Ramp(0.56, 380), "backward": Ramp(0.49, 390),
    "flash2 forward": Ramp(0.345, 300), "flash2 backward": Ramp(0.31, 400),
}  # fmt: skip
FLASH_B200: Mapping[str, Ramp] = {"forward": Ramp(0.6, 1600), "backward": Ramp(0.45, 500)}

# Computation takes 18.9 % longer on average while collectives run, on A100s and H100s: S. Lee et al., "Characterizing
# Compute-Communication Overlap in GPU-Accelerated Distributed Deep Learning" (arXiv 2507.03114).
YIELDS = 1 - 1 / 1.189

# Equal GPUs differ by 8 % on average, between the ends of box plots, 5.4 standard deviations: P. Sinha et al., "Not All
# GPUs Are Created Equal" (SC'22, arXiv 2208.11035). A step waits for the slowest.
VARIES = 0.08 / 5.4

SOURCE = "what kernels reach: tutti.hardware.reached"
