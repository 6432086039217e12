"""Estimates of a step's time, against figures derived by hand."""

import dataclasses

import pytest

from maxdiff import roofline
from maxdiff.topologies import GENERATIONS

HLO = """
HloModule jit_step

%fused.1 (p.0: bf16[2,8,8,16], p.1: bf16[3,3,16,32]) -> bf16[2,8,8,32] {
  %p.0 = bf16[2,8,8,16]{3,2,1,0} parameter(0)
  %p.1 = bf16[3,3,16,32]{3,2,1,0} parameter(1)
  ROOT %convolution.1 = bf16[2,8,8,32]{3,2,1,0} convolution(%p.0, %p.1), window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_01io->b01f
}

ENTRY %main.1 (a: bf16[2,8,8,16], k: bf16[3,3,16,32]) -> bf16[2,8,8,32] {
  %a = bf16[2,8,8,16]{3,2,1,0} parameter(0)
  %k = bf16[3,3,16,32]{3,2,1,0} parameter(1)
  %q = bf16[2,4,256,40]{3,2,1,0} parameter(2)
  %kv = bf16[2,4,128,40]{3,2,1,0} parameter(3)
  %mask = s8[1,2,2]{2,1,0} parameter(4)
  %g = f32[1000]{0} all-gather(%x), replica_groups=[1,4]<=[4], dimensions={0}
  %splash_mha_dq.3 = bf16[2,4,256,40]{3,2,1,0} custom-call(%mask, %q, %kv, /*index=3*/%kv), custom_call_target="tpu_custom_call"
  %copy.1 = bf16[2,8,8,16]{3,2,1,0} copy(%a)
  ROOT %fusion.1 = bf16[2,8,8,32]{3,2,1,0} fusion(%copy.1, %k), kind=kOutput, calls=%fused.1
}
"""


def test_work_is_counted_from_hlo():
    found = {one.kind: one for one in roofline.work(HLO, width=128)}
    # 22 of 24 places of the window in each direction lie inside.
    assert found["matmul"] == roofline.Work(
        "matmul", 2 * 2 * 16 * 32 * 22 * 22, 2 * (2 * 64 * 16 + 9 * 16 * 32 + 2 * 64 * 32), 1
    )
    # Three products, head_dim as wide as the matrix unit; the mask's bytes count, too.
    moved = 2 * (2 * 2 * 4 * 256 * 40 + 2 * 2 * 4 * 128 * 40) + 4
    assert found["attention"] == roofline.Work("attention", 3 * 2 * 2 * 4 * 256 * 128 * 128, moved, 1)
    assert found["other"] == roofline.Work("other", 0, 2 * 2 * 2 * 64 * 16, 1)


@pytest.mark.parametrize(("left", "window", "out", "expected"), [
    (1, "size=16 pad=15_15 rhs_reversal=1", 16, 16),  # a product of matrices whose rows are the window
    (8, "size=3 pad=1_1 stride=2", 4, 11), (4, "size=3 pad=2_1 lhs_dilate=2", 8, 11), (5, "", 5, 5),
])  # fmt: skip
def test_windows_count_where_they_meet_the_input(left: int, window: str, out: int, expected: int):
    size = int(window[5:].split()[0]) if window else 1
    rest = f"%a, %b), {f'window={{{window}}}, ' if window else ''}dim_labels=b0f_0io->b0f"
    assert roofline._convolution(rest, [1, left, 7], [size, 7, 3], [1, out, 3]) == 2 * 7 * 3 * expected


def test_each_part_takes_what_it_waits_for():
    chip = dataclasses.replace(GENERATIONS["v5e"], flops=100.0, hbm_speed=10.0, ici_speed=5.0, dcn_speed=2.0)
    work = [roofline.Work("matmul", 1000, 10, 2), roofline.Work("other", 0, 50, 1)]
    sums = {"ici all-gather": {"count": 1, "bytes": 50}, "dcn all-reduce": {"count": 1, "bytes": 6}}
    found = {"matmul": 20.0, "attention": 0.0, "other": 5.0, "ici": 10.0, "dcn": 3.0}
    assert roofline.seconds(work, sums, chip, 1.0) == found
    assert roofline.seconds(work, sums, chip, 0.5) == {**found, "ici": 20.0}
