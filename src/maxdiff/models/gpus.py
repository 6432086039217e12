"""Which kernels a GPU can have."""

import re
from typing import Any


def compute_capability(device: Any) -> tuple[int, int]:
    """NVIDIA's number for the generation of a jax device, (9, 0) for Hopper; (0, 0) of what is no GPU of theirs."""
    number = re.fullmatch(r"(\d+)\.(\d+)", str(getattr(device, "compute_capability", "")))
    return (int(number[1]), int(number[2])) if number and device.platform == "gpu" else (0, 0)


def has_triton(device: Any) -> bool:
    """Whether a jax device is a GPU that XLA compiles Triton kernels with bfloat16 for: NVIDIA's, from Ampere on."""
    return compute_capability(device) >= (8, 0)
