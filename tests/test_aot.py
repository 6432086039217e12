"""The training step compiled for TPUs by libtpu, on this CPU; names of slices; collectives read from HLO."""

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

import maxdiff.aot
from maxdiff import build, hlo, inputs, roofline
from maxdiff.aot import UNCOMPILED, WITHOUT_TPU, confirm, describe, main, prepare
from maxdiff.config import Config, load_config
from maxdiff.data.encoded import FINISHED, LATENTS_ALONE
from maxdiff.task import make_task
from maxdiff.topologies import Topology, parse

ROOT = Path(__file__).parent.parent
SMALL = [
    "unet={sample_size: 8, block_out_channels: [256], layers_per_block: 1, cross_attention_dim: 64, attention_head_dim: 8, "
    "down_block_types: [CrossAttnDownBlock2D], up_block_types: [CrossAttnUpBlock2D]}",
    "vae={block_out_channels: [32, 32], layers_per_block: 1, down_block_types: [DownEncoderBlock2D, DownEncoderBlock2D], "
    "up_block_types: [UpDecoderBlock2D, UpDecoderBlock2D]}",
    "text_encoder={hidden_size: 64, intermediate_size: 64, num_hidden_layers: 1, num_attention_heads: 2}",
    "run_name=r", "resolution=64", "per_device_batch_size=4", "cache_latents_text_encoder_outputs=true",
]  # fmt: skip


# 16 x 16 latents: 256 queries, so that there is splash attention.
TINY = [
    "unet={sample_size: 16, block_out_channels: [128], layers_per_block: 1, cross_attention_dim: 64, attention_head_dim: 2, "
    "down_block_types: [CrossAttnDownBlock2D], up_block_types: [CrossAttnUpBlock2D]}",
    *SMALL[1:3], "run_name=r", "resolution=32", "per_device_batch_size=2", "cache_latents_text_encoder_outputs=true",
]  # fmt: skip


# All that compiles for longer, and sends nothing, is left out: attention is in the middle alone.
PLAIN = [
    TINY[0].replace("CrossAttn", ""),
    *TINY[1:],
    "optimizer=lion",
    "use_ema=false",
    "max_grad_norm=0",
    "attention=dot_product",
]


def aot(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "maxdiff.aot", str(ROOT / "configs" / "base.yml"), *SMALL, *arguments]
    environment = {**os.environ, **WITHOUT_TPU, "XLA_FLAGS": "", "PYTHONPATH": str(ROOT / "src")}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)


@pytest.mark.parametrize(("name", "shape", "chips"), [
    ("v5p:4x4x4", "v5p:4x4x4", 64), ("v5p-128", "v5p:4x4x4", 64), ("v4-8", "v4:2x2x1", 4), ("v5litepod-256", "v5e:16x16", 256),
    ("v6e-256", "v6e:16x16", 256), ("V5E-16", "v5e:4x4", 16), ("v5p-1024", "v5p:8x8x8", 512), ("v5p-12288", "v5p:16x16x24", 6144),
    ("v5p:4x8x20", "v5p:4x8x20", 640),
])  # fmt: skip
def test_slices_by_their_names(name: str, shape: str, chips: int):
    found = parse(name)
    assert (str(found), found.chips) == (shape, chips)
    assert parse(name, 2).chips == 2 * chips


def test_links_that_lead_nowhere_carry_nothing():
    assert [parse(name).linked for name in ("v5p:4x4x4", "v5p:2x2x1", "v5e-8", "v6e-256", "v4:2x2x4")] == [
        1,
        2 / 6,
        3 / 4,
        1,
        4 / 6,
    ]


@pytest.mark.parametrize(("name", "message"), [
    ("", "topology is required \\(allowed: v4, v5e, v5p, v6e"), ("h100", "'h100' is no TPU \\(allowed: v4, v5e, v5p, v6e"),
    ("v5e-7", "is no slice of v5e \\(allowed: 1x1, 2x2, .*16x16, as v5e:1x1, which are v5e-1, v5e-4, .*v5e-256\\)"),
    ("v5p:4x4", "is no slice of v5p \\(allowed: 2x2x1, .* of multiples of 4, A <= B <= C and at most 6144 chips\\)"),
    ("v5p-9", "is no slice of v5p"), ("v5e:32x32", "is no slice of v5e"), ("v6e:1000x1000", "is no slice of v6e"),
    ("v5p:32x32x32", "is no slice of v5p"), ("v4-12288", "is no slice of v4"), ("v5p:4x4x0", "is no slice of v5p"),
])  # fmt: skip
def test_other_names_are_errors(name: str, message: str):
    with pytest.raises(ValueError, match=message):
        parse(name)


HLO = """
HloModule jit_step, is_scheduled=true, num_partitions=4

%body.1 (p.1: f32[8]) -> f32[8] {
  %all-reduce.1 = f32[8]{0} all-reduce(%x), replica_groups={{0,1},{2,3}}, to_apply=%sum.1
}

%all-reduce-scatter.5 (p.2: f32[8]) -> f32[2] {
  %all-reduce.9 = f32[8]{0} all-reduce(%p.2), replica_groups=[1,4]<=[4], to_apply=%sum.1
}

%below.1 (p.4: (s32[], f32[8])) -> pred[] {
  %i.1 = s32[]{:T(128)} get-tuple-element(%p.4), index=0
  %c.4 = s32[]{:T(128)} constant(5), metadata={op_name="jit(step)"}
  ROOT %lt.1 = pred[]{:T(512)} compare(%i.1, %c.4), direction=LT
}

%body.2 (p.5: (s32[], f32[8])) -> (s32[], f32[8]) {
  %all-to-all.1 = f32[8]{0} all-to-all(%x), replica_groups={{0,1},{2,3}}
}

%begin.1 (p.6: f32[2]) -> (f32[2], f32[8], s32[2]) {
  %all-gather.7 = f32[8]{0} all-gather(%p.6), replica_groups={{0,1},{2,3}}, dimensions={0}, frontend_attributes={chain_id="24"}
  ROOT %begun.1 = (f32[2]{0}, f32[8]{0}, s32[2]{0}) custom-call(%all-gather.7), custom_call_target="AsyncCollectiveStart"
}

%async_collective_fusion.1 (p.7: f32[2], p.8: f32[8], p.9: f32[2]) -> (f32[2], f32[8], f32[2]) {
  %all-gather.8 = f32[8]{0} all-gather(%p.7), replica_groups={{0,1},{2,3}}, dimensions={0}, frontend_attributes={chain_id="24"}
}

%end.1 (p.10: f32[2], p.11: f32[8]) -> f32[8] {
  %all-gather.9 = f32[8]{0} all-gather(%p.10), replica_groups={{0,1},{2,3}}, dimensions={0}, frontend_attributes={chain_id="24"}
  ROOT %done.1 = f32[8]{0} custom-call(%p.10, %all-gather.9), custom_call_target="AsyncCollectiveDone"
}

ENTRY %main.7 (a: f32[8]) -> f32[8] {
  %l.1 = (s32[], f32[8]{0}) while(%t), condition=%below.1, body=%body.2, metadata={op_name="jit(step)/while"}
  %q = f32[2]{0} parameter(1)
  %b.1 = (f32[2]{0}, f32[8]{0}, s32[2]{0}) fusion(%q), kind=kCustom, calls=%begin.1
  %q.1 = f32[2]{0} get-tuple-element(%b.1), index=0
  %q.2 = f32[8]{0} get-tuple-element(%b.1), index=1
  %b.2 = (f32[2]{0}, f32[8]{0}, f32[2]{0}) fusion(%q.1, %q.2, %q), kind=kLoop, output_to_operand_aliasing={{0}: (0, {}), {1}: (1, {})}, calls=%async_collective_fusion.1
  %b.3 = f32[8]{0} fusion(%q.1, %q.2), kind=kCustom, calls=%end.1
  %w = f32[8]{0} while(%a), condition=%c.1, body=%body.1, backend_config={"known_trip_count":{"n":"3"}}
  %g.1 = (bf16[2]{0}, bf16[8]{0}) all-gather-start(%a), replica_groups=[1,4]<=[2,2]T(1,0), dimensions={0}
  %g.2 = bf16[8]{0} all-gather-done(%g.1)
  %o.1 = f32[8]{0} all-gather(%a), replica_groups=mesh['axis_0'=1,'axis_1'=2,'axis_2'=2], device_ids=([2,2]T(1,0)) {'axis_2'}, dimensions={0}
  %n.1 = f32[8]{0} all-reduce(%a), replica_groups={}, to_apply=%sum.1
  %m.1 = f32[8]{0} all-reduce(%a), replica_groups=mesh['data'=2,'fsdp'=2] {'data'}, to_apply=%sum.1
  %f.1 = f32[2]{0} fusion(%a), kind=kCustom, calls=%all-reduce-scatter.5
  %s.1 = (f32[2,8]{1,0}, u32[], token[]) send(%b, %t), frontend_attributes={_xla_megascale_target="{1,2}x{0:3}",_xla_megascale_transfer_type="ALL_REDUCE"}
  %s.2 = (f32[4]{0}, u32[], token[]) send(%b, %t), frontend_attributes={_xla_megascale_target="{0,1,2}x{0:3}",_xla_megascale_transfer_type="ALL_GATHER"}
  %s.3 = (f32[6]{0}, u32[], token[]) send(%b, %t), frontend_attributes={_xla_megascale_target="{0,1,2}x{0:3}",_xla_megascale_transfer_type="REDUCE_SCATTER"}
  ROOT %p.9 = f32[4]{0} collective-permute(%a), source_target_pairs={{0,2},{2,0}}
}
"""


def test_collectives_are_read_from_hlo():
    """Bytes by hand: what a device sends in a ring."""
    found = hlo.totals(hlo.collectives(HLO, slices=[0, 0, 1, 1]))
    assert found == {
        # A slice's own 16 bytes go to two others; of the 24 that are summed two thirds.
        "dcn all-gather": {"count": 3, "bytes": 8 * 2 * 3 / 4 + 16 + 2 * 16},
        "dcn all-reduce": {"count": 3, "bytes": 16 * 4 + 32 + 2 * 24},
        "dcn collective-permute": {"count": 1, "bytes": 16},
        "dcn reduce-scatter": {"count": 2, "bytes": 2 * 4 * 3 + 24 * 2 / 3},
        # One that begins in a fusion, goes on in another and ends in a third; and what a loop of 5 does.
        "ici all-gather": {"count": 1, "bytes": 16},
        "ici all-reduce": {"count": 3, "bytes": 3 * 32},
        "ici all-to-all": {"count": 5, "bytes": 5 * 16},
    }
    assert hlo.totals(hlo.collectives(HLO))["ici all-gather"] == {"count": 3, "bytes": 16 + 12 + 16}
    # Of a program of one slice the devices are its own, whatever the mesh has: what leaves it is what is sent.
    of_one = hlo.totals(hlo.collectives(HLO, slices=[0, 1] * 4))
    assert {name: one["count"] for name, one in of_one.items() if name.startswith("dcn")} == {
        "dcn all-gather": 1, "dcn all-reduce": 1, "dcn reduce-scatter": 1,
    }  # fmt: skip


def test_a_loop_that_counts_otherwise_is_an_error():
    with pytest.raises(ValueError, match=r"how often the loop l\.1 of the compiled step runs cannot be read"):
        hlo.collectives(HLO.replace("direction=LT", "direction=GT"))


def test_what_a_fusion_has_for_a_collective_behind_it_takes_no_time():
    """Of the three fusions only the second moves something of its own: the 8 bytes that it reads, and those that it writes."""
    others = roofline.work(re.sub(r"\n  %b\..*", "", HLO), 128)
    found = roofline.work(HLO, 128)
    assert len(found) == len(others) + 1
    assert sum(one.moved for one in found) - sum(one.moved for one in others) == 16


def test_a_step_for_a_slice_is_reported():
    done = aot(*TINY, "topology=v5e-4", "ici_fsdp_parallelism=4", "--json")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["fits"]
    assert (found["chips"], found["mesh"], found["global_batch"]) == (4, {"data": 1, "fsdp": 4, "tensor": 1}, 8)
    # What the step is called with is the state, the batch, and the texts of the empty caption.
    state = sum(found["bytes"][name] for name in ("parameters", "average", "moments", "batch"))
    assert found["bytes"]["arguments"] == pytest.approx(state, rel=0.01)
    assert found["bytes"]["peak"] > found["bytes"]["arguments"]
    assert 0 < found["estimate"]["mfu"] < 1
    assert found["estimate"]["step_s"] == pytest.approx(sum(found["estimate"]["parts_s"].values()))
    lines = describe(found)
    assert any(line.startswith("it FITS: ") for line in lines)
    assert any(line.startswith("about ") and "ms a step by rooflines, an ESTIMATE: " in line for line in lines)


# Reports a step on several meshes, and numbers of its parameters: split over chips, and not; of those that a chip has, gathered,
# which fsdp splits; and a chip's part of the moments, each filled up to whole tiles of memory.
MESHES = """
import json, math, sys
import jax
from maxdiff.aot import prepare, report
from maxdiff.config import load_config
from maxdiff.topologies import parse

jax.config.update("jax_platforms", "cpu")
for topology, slices, level, *keys in json.loads(sys.argv[2]):
    on = parse(topology, slices)
    step = prepare(load_config(sys.argv[1], [*json.loads(sys.argv[3]), *keys]), on.devices())
    leaves = jax.tree.leaves(step.state.params)
    whole = [leaf.sharding.is_fully_replicated for leaf in leaves]
    sizes = [leaf.size for leaf in leaves]
    counts = {"split": sum(s for s, w in zip(sizes, whole) if not w), "whole": sum(s for s, w in zip(sizes, whole) if w)}
    ways = lambda leaf, axis: step.mesh.shape[axis] if axis in str(leaf.sharding.spec) else 1
    counts["fsdp"] = sum(leaf.size / ways(leaf, "tensor") for leaf in leaves if ways(leaf, "fsdp") > 1)
    moments = [leaf for leaf in jax.tree.leaves(step.state.opt_state) if ways(leaf, "data") > 1]
    counts["part"] = sum(-(-math.prod(leaf.sharding.shard_shape(leaf.shape)) // 1024) * 1024 for leaf in moments)
    print(json.dumps({**report(step, on, level), **counts}), flush=True)
"""
CASES = {
    "data": ("v5e-4", 1, "quick"),
    "fsdp over a whole slice": ("v5e-16", 1, "quick", "ici_fsdp_parallelism=16"),
    "fsdp, optimized as a TPU would": ("v5e-4", 1, "full", "ici_fsdp_parallelism=4"),
    "the optimizer split over data": ("v5e-16", 1, "quick", "shard_optimizer=true"),
    "tensor, three times a step": ("v5e-4", 1, "quick", "ici_tensor_parallelism=2", "attention=flash", "global_batch_size=12"),
    "fsdp and tensor": ("v5e-8", 1, "quick", "ici_fsdp_parallelism=2", "ici_tensor_parallelism=2"),
    "slices": ("v5e-4", 2, "quick"),
    "all at once": ("v5e-4", 2, "quick", "ici_fsdp_parallelism=2", "shard_optimizer=true"),
    "data over slices alone": ("v5e-4", 2, "quick", "ici_fsdp_parallelism=4", "shard_optimizer=true"),
    "fsdp over slices": ("v5e-4", 2, "quick", "dcn_data_parallelism=1", "dcn_fsdp_parallelism=2"),
}


@pytest.fixture(scope="module")
def meshes() -> dict[str, dict[str, Any]]:
    """The report of each of CASES."""
    base = str(ROOT / "configs" / "base.yml")
    command = [sys.executable, "-c", MESHES, base, json.dumps([*CASES.values()]), json.dumps(PLAIN)]
    environment = {**os.environ, **WITHOUT_TPU, "XLA_FLAGS": "", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    return dict(zip(CASES, map(json.loads, done.stdout.splitlines()), strict=True))


def sent(found: dict[str, Any]) -> dict[str, float]:
    """Bytes by network and kind; what is less than a thousandth of all is left out."""
    total = sum(one["bytes"] for one in found["collectives"].values())
    return {name: one["bytes"] for name, one in found["collectives"].items() if one["bytes"] > 1e-3 * total}


# What a chip sends, by hand: of gradients 4 bytes a number, of gathered weights 2. On TPUs parts are filled up to whole tiles,
# and XLA sums the smallest of all kernels whole, in one operation.
SMALLEST = 0.25


def test_data_sums_gradients_and_sends_no_more(meshes: dict[str, dict[str, Any]]):
    found = meshes["data"]
    assert sent(found) == {"ici all-reduce": pytest.approx(2 * 3 / 4 * 4 * found["whole"], rel=0.01)}


@pytest.mark.parametrize(("name", "chips"), [("fsdp over a whole slice", 16), ("fsdp, optimized as a TPU would", 4)])
def test_fsdp_gathers_weights_and_scatters_gradients(meshes: dict[str, dict[str, Any]], name: str, chips: int):
    found = meshes[name]
    bytes_, share = sent(found), (chips - 1) / chips
    scattered = share * 4 * found["split"]
    assert bytes_.pop("ici all-gather") == pytest.approx(share * 2 * found["split"], rel=0.02)
    assert bytes_.pop("ici reduce-scatter") == pytest.approx(scattered, rel=0.1)
    assert bytes_.pop("ici all-reduce", 0) < 2 * share * 4 * found["whole"] + SMALLEST * scattered
    bytes_.pop("ici collective-permute", None)  # where two parts share a tile
    assert not bytes_


def test_a_split_optimizer_scatters_gradients_and_gathers_parameters(meshes: dict[str, dict[str, Any]]):
    found = meshes["the optimizer split over data"]
    bytes_, once = sent(found), 15 * 4 * found["part"]
    assert bytes_.pop("ici reduce-scatter") + bytes_["ici all-reduce"] / 2 == pytest.approx(once, rel=0.05)
    assert bytes_.pop("ici all-gather") == pytest.approx(once, rel=0.01)
    assert bytes_.pop("ici all-reduce") < SMALLEST * once
    assert not bytes_


# The network with a tensor axis of 2, by hand. Each of two attentions and the feed-forward of its one block sums the residual
# stream over it, in bfloat16, forward and backward; and the time's embedding, forward, for 2 examples. Each chip computes half of
# the gradient of GEGLU's projection, which lies whole.
ACTIVATIONS = 6 * 2 * 2 * 256 * 128 + 2 * 2 * 512
HALF = 2 * 128 * 1024 / 2


def test_tensor_sums_activations_each_time_and_gradients_once_and_gathers_none(meshes: dict[str, dict[str, Any]]):
    found, times = meshes["tensor, three times a step"], 3
    bytes_ = sent(found)
    gradients = 2 * 1 / 2 * 4 * (found["whole"] + found["split"] / 2)
    assert bytes_.pop("ici all-reduce") == pytest.approx(gradients + times * ACTIVATIONS, rel=0.001)
    assert bytes_.pop("ici all-gather") == pytest.approx(times * HALF, rel=0.01)
    assert not bytes_
    assert found["estimate"]["parts_s"]["attention"] > 0


def test_fsdp_and_tensor_gather_weights_and_scatter_gradients(meshes: dict[str, dict[str, Any]]):
    """As fsdp alone, of the part that tensor leaves; what is scattered is then summed over data."""
    found = meshes["fsdp and tensor"]
    bytes_ = sent(found)
    assert bytes_.pop("ici all-gather") == pytest.approx(1 / 2 * 2 * found["fsdp"] + HALF, rel=0.01)
    assert bytes_.pop("ici reduce-scatter") == pytest.approx(1 / 2 * 4 * found["fsdp"], rel=0.01)
    assert bytes_.pop("ici all-reduce") == pytest.approx(2 * 1 / 2 * 4 * found["fsdp"] / 2 + ACTIVATIONS, rel=0.03)
    bytes_.pop("ici collective-permute", None)  # where two parts share a tile
    assert not bytes_


def test_slices_send_their_sums_to_each_other(meshes: dict[str, dict[str, Any]]):
    found = meshes["slices"]
    bytes_ = sent(found)
    between = sum(size for name, size in bytes_.items() if name.startswith("dcn"))
    # The chips of a slice share the sum of all its gradients, and each exchanges its quarter.
    assert between == pytest.approx(2 * 1 / 2 * 4 * found["whole"] / 4, rel=0.01)
    assert {name.split()[1] for name in bytes_} <= {"all-reduce", "reduce-scatter", "all-gather"}


def test_over_slices_a_split_optimizer_sends_little(meshes: dict[str, dict[str, Any]]):
    """Of sums a chip sends another slice the part that this is to update, and of the new parameters its own part."""
    found = meshes["all at once"]
    bytes_ = sent(found)
    assert bytes_.pop("dcn reduce-scatter") == pytest.approx(4 * found["part"], rel=0.01)
    assert bytes_.pop("dcn all-gather") == pytest.approx(4 * found["part"], rel=0.01)
    assert not [name for name in bytes_ if name.startswith("dcn")]


def test_a_step_that_does_not_fit_says_by_how_much():
    done = aot(*PLAIN, "topology=v5e-1", "per_device_batch_size=65536")
    assert done.returncode == 1, done.stderr
    assert "it does NOT fit: " in done.stdout
    assert " GiB more than the 15.75 GiB there are" in done.stdout
    # What would fit is compiled too.
    assert re.search(r"would fit, as predicted: .*per_device_batch_size=\d+ global_batch_size=65536 \(", done.stdout)
    assert "    it FITS: " in done.stdout


def test_an_axis_over_slices_alone_sends_what_is_split_once(meshes: dict[str, dict[str, Any]]):
    bytes_ = sent(meshes["data over slices alone"])
    part = 4 * meshes["data over slices alone"]["part"]
    assert bytes_["dcn reduce-scatter"] == pytest.approx(part, rel=0.01)
    assert bytes_["dcn all-gather"] == pytest.approx(part, rel=0.01)


def test_fsdp_over_slices_gathers_weights_at_once(meshes: dict[str, dict[str, Any]]):
    """Each chip sends the other slice its half in bfloat16, and half of the gradients; sums over data stay within a slice."""
    found = meshes["fsdp over slices"]
    bytes_ = sent(found)
    assert bytes_["dcn all-gather"] == pytest.approx(1 / 2 * 2 * found["split"], rel=0.02)
    assert bytes_["dcn reduce-scatter"] == pytest.approx(1 / 2 * 4 * found["split"], rel=0.02)
    assert bytes_["ici all-reduce"] == pytest.approx(2 * 3 / 4 * 4 * (found["split"] / 2 + found["whole"]), rel=0.02)
    assert found["collectives"]["dcn all-gather"]["count"] <= 2  # all of a dtype at once


@pytest.mark.parametrize(("arguments", "message"), [
    (["topology=v5e-9"], "topology='v5e-9' is no slice of v5e"),
    ([], "topology is required (allowed: v4, v5e, v5p, v6e, "),
    (["topology=v5e-4", "topology=v5e-8"], "topology=v5e-4,v5e-8 stands 2 times (allowed: once)"),
    (["topolgy=v5e-4"], "there is no key 'topolgy' (of topolgy=v5e-4); did you mean 'topology'?"),
    (["topology=v5e-4", "num_slices=0"], "num_slices=0 is not one whole number (allowed: 1 or more)"),
    (["topology=v5e-4", "num_slices=1000"], "num_slices=1000 (allowed: 1 to 256)"),
    (["topology=v5e-4", "num_slice=2"], "there is no key 'num_slice' (of num_slice=2); did you mean 'num_slices'?"),
    (["topology=v5e-4", "optimization=best"], "optimization='best' is not supported (allowed: quick, full)"),
    (["topology=v5e-4", "unet_size=3"], "unet_size"),
    (["topology=v5e-4", "--jsn"], "there is no option --jsn (allowed: --json, --print-config, --help"),
])  # fmt: skip
def test_mistakes_are_told_in_a_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture):
    assert main([str(ROOT / "configs" / "base.yml"), *SMALL, *arguments]) == 2
    shown = capsys.readouterr()
    assert message in shown.err
    assert shown.err.count("\n") == 1
    assert not shown.out


def test_without_a_configuration_nothing_fits(capsys: pytest.CaptureFixture):
    assert main(["topology=v5e-4", "--json"]) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith("maxdiff.aot: which configuration? usage: python -m maxdiff.aot CONFIG.yml ")
    assert not shown.out


def test_a_mesh_that_the_slice_does_not_have_is_told_in_a_line():
    done = aot("topology=v5e-4", "ici_fsdp_parallelism=3")
    assert done.returncode == 2
    assert "the product must be the number of 4 devices in a slice" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_compiler_that_fails_is_no_step_that_does_not_fit(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    """Of settings that are tried it ends one; of the step itself, the command."""

    def failing() -> Any:
        raise jax.errors.JaxRuntimeError("INTERNAL: a bug\nits stack")

    config = load_config(ROOT / "configs" / "base.yml", [*TINY, "per_device_batch_size=8"])
    step = dataclasses.replace(prepare(config, jax.devices()[:1]), lower=failing)
    monkeypatch.setattr(maxdiff.aot, "prepare", lambda config, devices: step)
    monkeypatch.setattr(Topology, "devices", lambda self: jax.devices()[:1])
    assert main([str(ROOT / "configs" / "base.yml"), *TINY, "topology=v5e-1"]) == UNCOMPILED
    shown = capsys.readouterr()
    assert shown.err == "maxdiff.aot: the step could not be compiled: INTERNAL: a bug\n"
    assert not shown.out
    found = list(confirm(step, [{"set": {"remat": "full"}}, {"set": {"per_device_batch_size": 4}}], parse("v5e-1"), "quick"))
    assert [one["set"] for one in found] == [{"remat": "full"}, {"per_device_batch_size": 4}]
    assert {one["uncompiled"] for one in found} == {"INTERNAL: a bug"}


def test_without_libtpu_it_says_what_brings_it(tmp_path: Path):
    (tmp_path / "libtpu.py").write_text("raise ImportError('none')")
    command = [sys.executable, "-m", "maxdiff.aot", str(ROOT / "configs" / "base.yml"), *SMALL, "topology=v5e-4"]
    environment = {**os.environ, **WITHOUT_TPU, "XLA_FLAGS": "", "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT / 'src'}"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
    assert "needs libtpu, which pip install -e '.[tpu]' brings" in done.stderr


def test_help_is_one_line(capsys: pytest.CaptureFixture):
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("usage: python -m maxdiff.aot CONFIG.yml ")
    assert "topology=NAME [num_slices=N] [optimization=quick|full] [--json]\n" in shown


DEVICES = """
from maxdiff.topologies import parse
for name in ("v4-16", "v5e-16", "v5p-16", "v6e-16"):
    found = parse(name, 2)
    devices = found.devices()
    print(name, len(devices) == found.chips, sorted({device.slice_index for device in devices}))
"""


def test_libtpu_knows_the_slices():
    environment = {**os.environ, **WITHOUT_TPU, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, "-c", DEVICES], env=environment, capture_output=True, text=True, timeout=100)
    names = ("v4-16", "v5e-16", "v5p-16", "v6e-16")
    assert done.stdout.splitlines() == [f"{name} True [0, 1]" for name in names], done.stderr


def test_what_the_mesh_does_not_divide_is_said():
    notes = lambda devices, *keys: left_whole(devices, load_config(ROOT / "configs" / "base.yml", [*TINY, *keys]))
    assert notes(8, "shard_optimizer=true") == []
    assert notes(7, "shard_optimizer=true") == [
        "shard_optimizer: 100% of the moments are not split over data=7, which divides none of their dimensions "
        "(a larger ici_fsdp_parallelism leaves less)"
    ]
    assert notes(4, "ici_tensor_parallelism=2") == []
    assert notes(4, "ici_tensor_parallelism=4") == [
        "unet: attention of 2 heads is not split over tensor=4, which does not divide them: each device of the axis computes all of it"
    ]


def left_whole(devices: int, config: Config) -> list[str]:
    step = prepare(config, jax.devices()[:devices])
    return build.left_whole(step.config, step.mesh, step.task, step.state)


def test_of_what_is_encoded_already_the_step_is_the_cached_one(tmp_path: Path):
    latents = {"version": 1, "examples": 0, "bytes": [], "path": "", "form": {}, "mix": None, "made_of": {LATENTS_ALONE: True}}
    keys = [*TINY, f"train_data_dir={tmp_path}", "cache_latents_text_encoder_outputs=false"]
    (tmp_path / FINISHED).write_text(json.dumps(latents))
    alone = prepare(load_config(ROOT / "configs" / "base.yml", keys), jax.devices())
    (tmp_path / FINISHED).write_text(json.dumps({**latents, "made_of": {}}))
    step = prepare(load_config(ROOT / "configs" / "base.yml", keys), jax.devices())
    assert step.batch.keys() == {"mean", "logvar", "states", "position", "original_size", "crop"}
    assert not step.task.constants["frozen"]
    # With a text encoder in training, or another caption each time, of latents alone.
    for more in ("train_text_encoder=true", "shuffle_tags=true"):
        config = load_config(ROOT / "configs" / "base.yml", [*TINY, more])
        with pytest.raises(
            ValueError, match=f"{more.partition('=')[0]}=True cannot be trained from .*, where captions are encoded"
        ):
            prepare(load_config(ROOT / "configs" / "base.yml", [*keys, more]), jax.devices())
        other = prepare(config, jax.devices())
        if more == "shuffle_tags=true":
            assert (alone.batch.keys(), alone.task.flops) == (other.batch.keys(), other.task.flops)
            assert alone.task.constants["frozen"].keys() == {"text_encoder"}
        assert other.batch.keys() == {"mean", "logvar", "input_ids", "position", "original_size", "crop"}
        assert other.task.constants["frozen"].keys() == ({"text_encoder"} if more == "shuffle_tags=true" else set())
        assert other.task.flops > step.task.flops


def test_it_is_the_step_of_a_run_and_needs_no_weights(one_level: Path, tmp_path: Path):
    """Lowered for the devices that are here, both ways."""
    shutil.copytree(one_level, tmp_path / "pipeline", ignore=shutil.ignore_patterns("*.safetensors"))
    keys = [f"pretrained_model_name_or_path={one_level}", "run_name=r", f"output_dir={tmp_path}", "resolution=16",
            "per_device_batch_size=2", "global_batch_size=32", "ici_fsdp_parallelism=4", "shard_optimizer=true"]  # fmt: skip
    config = load_config(ROOT / "configs" / "base.yml", keys)
    layout = build.layout_of(config)
    config, accumulation = build.settle_batch(config, layout.mesh)
    task = make_task(config, layout, None)
    optimizer = build.make_adam(config, build.make_rates(config, task))
    state = build.abstract_of(config, layout, task, optimizer)
    step = build.make_step(config, layout, task, optimizer, state, accumulation)
    batch = inputs.abstract_batch(inputs.make_plan(config), list(task.tokenizers.values()), build.batch_sharding(layout.mesh))
    expected = step.lower(state, task.constants, batch, build.run_key(config, layout.mesh)).as_text()
    without = load_config(ROOT / "configs" / "base.yml", [*keys, f"pretrained_model_name_or_path={tmp_path}/pipeline"])
    lowered = prepare(without, jax.devices()).lower()
    assert lowered.as_text() == expected
    # No array is part of the program, and its state comes as it goes: a second step compiles nothing.
    assert max(map(len, expected.splitlines())) < 2**20
    compiled = lowered.compile()
    assert compiled.output_shardings[0] == compiled.input_shardings[0][0]
