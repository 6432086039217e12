"""Peaks by kind of device."""

from types import SimpleNamespace

import pytest

from maxdiff.accelerators import peak_flops


@pytest.mark.parametrize(
    ("kind", "cores", "peak"),
    [
        ("TPU v3", 1, 61.5e12), ("TPU v4", 1, 137.5e12), ("TPU v4", 2, 275e12), ("TPU v5 lite", 1, 197e12), ("TPU v5", 2, 459e12),
        ("TPU v6 lite", 1, 918e12), ("TPU7x", 1, 1153.5e12), ("NVIDIA H100 80GB HBM3", None, 989.5e12),
        ("NVIDIA A100-SXM4-80GB", None, 312e12), ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", None, None), ("cpu", None, None),
    ],
)  # fmt: skip
def test_peaks_are_those_of_a_device(kind: str, cores: int | None, peak: float | None):
    assert peak_flops(SimpleNamespace(device_kind=kind, num_cores=cores)) == peak
