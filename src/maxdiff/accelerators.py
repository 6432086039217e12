"""What accelerators could do at most, which model FLOP utilisation is measured against."""

import os
from typing import Any

# Dense bfloat16 FLOP/s of one TensorCore, by jax's device_kind. A jax device is one core on v2, v3, v5e, v6e and 7x, both
# cores of a chip on v5p, and on v4 one or both as the runtime was started: hence per core, times the device's num_cores.
# Source: "peak compute per chip (bf16)" in https://docs.cloud.google.com/tpu/docs/v2, .../v3, .../v4, .../v5e, .../v5p,
# .../v6e and .../tpu7x; kinds and cores as libtpu 0.0.50 describes these topologies.
TENSOR_CORE_FLOPS = {
    "TPU v2": 46e12 / 2,
    "TPU v3": 123e12 / 2,
    "TPU v4": 275e12 / 2,
    "TPU v5 lite": 197e12,  # v5e
    "TPU v5": 459e12 / 2,  # v5p
    "TPU v5p": 459e12 / 2,
    "TPU v6 lite": 918e12,  # v6e
    "TPU7x": 2307e12 / 2,
}

# Dense bfloat16 FLOP/s with float32 accumulation of a whole GPU, by CUDA's name of it. Noted from the pages named, which
# were not opened again when this was written: of all these, only the H100 SXM's has been worked with. NVIDIA's data
# sheets print twice as much where they say "with sparsity". Whole names: a MIG slice carries the card's name and more, and
# does less.
GPU_FLOPS = {
    # https://www.nvidia.com/en-us/data-center/gb200-nvl72 (per GPU), .../hgx
    "NVIDIA GB200": 2500e12,
    "NVIDIA B200": 2250e12,
    # https://www.nvidia.com/en-us/data-center/h200, .../h100, .../grace-hopper-superchip
    "NVIDIA H200": 989.5e12,
    "NVIDIA H200 NVL": 835.5e12,
    "NVIDIA GH200 480GB": 989.5e12,
    "NVIDIA H100 80GB HBM3": 989.5e12,  # SXM
    "NVIDIA H100 NVL": 835.5e12,
    "NVIDIA H100 PCIe": 756.5e12,
    # https://www.nvidia.com/en-us/data-center/a100
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA A100-PCIE-40GB": 312e12,
    # https://www.nvidia.com/en-us/data-center/l40s, .../l4, .../products/a10-gpu, .../a40, .../products/a30-gpu
    "NVIDIA L40S": 362e12,
    "NVIDIA L4": 121e12,
    "NVIDIA A10": 125e12,
    "NVIDIA A40": 149.7e12,
    "NVIDIA A30": 165e12,
    # The architecture papers of Blackwell RTX, Ada and GA102: float16 or bfloat16 with float32 accumulation
    "NVIDIA GeForce RTX 5090": 209.5e12,
    "NVIDIA GeForce RTX 4090": 165.2e12,
    "NVIDIA GeForce RTX 3090": 71e12,
    "NVIDIA RTX A6000": 154.8e12,
    # https://www.nvidia.com/en-us/data-center/v100, .../tesla-t4: float16, for these know no bfloat16
    "Tesla V100-SXM2-32GB": 125e12,
    "Tesla V100-SXM2-16GB": 125e12,
    "Tesla V100-PCIE-32GB": 112e12,
    "Tesla V100-PCIE-16GB": 112e12,
    "Tesla T4": 65e12,
}


def peak_flops(device: Any) -> float | None:
    """Dense bfloat16 FLOP/s of a jax device at most; None for a CPU or a kind that the tables lack."""
    if device.device_kind in TENSOR_CORE_FLOPS:
        return TENSOR_CORE_FLOPS[device.device_kind] * device.num_cores
    return GPU_FLOPS.get(device.device_kind)


def make_deterministic() -> None:
    """Have GPUs repeat a program bit for bit, in this process and in every other; before JAX is first asked for devices.

    XLA then uses no operation whose sums come in an order of chance, and chooses kernels by rule, not by timing them.
    """
    add_flags("XLA_FLAGS", "--xla_gpu_deterministic_ops=true")


def add_flags(variable: str, flags: str) -> None:
    """Add to the flags in an environment variable; before JAX is first asked for devices, or they do nothing."""
    os.environ[variable] = f"{os.environ.get(variable, '')} {flags}".strip()
