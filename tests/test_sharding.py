from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from benchmarks import parity
from maxdiff.models.network import Network, flatten
from maxdiff.models.unet import UNet2DConditionModel, UNetConfig
from maxdiff.sharding import Layout, activation_spec, make_mesh, parameter_spec, update_spec
from maxdiff.weights.checkpoint import make_network, open_checkpoint
from maxdiff.weights.load import load_params

AXES = ("data", "fsdp", "tensor")
# The rules of MaxDiffusion's configurations for these models, as they stand there.
MAXDIFFUSION_RULES = [
    ["batch", "data"],
    ["activation_batch", ["data", "fsdp"]],
    ["activation_heads", "tensor"],
    ["activation_kv", "tensor"],
    ["embed", "fsdp"],
    ["heads", "tensor"],
    ["conv_batch", ["data", "fsdp"]],
    ["out_channels", "tensor"],
    ["conv_out", "fsdp"],
]


def mesh(*sizes: int):
    return make_mesh(AXES, dict(zip(AXES, sizes, strict=True)), {})


def unet(config: dict) -> Network:
    return Network(UNet2DConditionModel, UNetConfig.from_dict(config))


def test_one_size_may_be_what_is_left():
    assert dict(mesh(-1, 2, 2).shape) == {"data": 2, "fsdp": 2, "tensor": 2}
    assert dict(mesh(1, -1, 1).shape) == {"data": 1, "fsdp": 8, "tensor": 1}


class Chip:
    """A device as make_mesh sees it, of which two slices exist."""

    platform = "tpu"
    device_kind = "TPU v4"
    process_index = 0

    def __init__(self, index: int):
        self.id, self.slice_index = index, index // 4
        self.coords, self.core_on_chip = (index % 2, index % 4 // 2, 0), 0


def test_slices_lie_along_the_dcn_axis():
    grid = make_mesh(AXES, {"data": 1, "fsdp": 4, "tensor": 1}, {"data": 2}, devices=[Chip(i) for i in range(8)]).devices
    assert grid.shape == (2, 4, 1)
    assert [{chip.slice_index for chip in row.flat} for row in grid] == [{0}, {1}]


@pytest.mark.parametrize(
    ("ici", "dcn", "message"),
    [
        ((3, 1, 1), {}, "ici_data_parallelism=3, .* the product must be the number of 8 devices in a slice"),
        ((-1, 3, 1), {}, "the product must be the number of 8 devices in a slice"),
        ((-1, -1, 1), {}, "sizes must be positive, and one of them may be -1"),
        ((8, 0, 1), {}, "sizes must be positive"),
        ((8, 1, 1), {"data": 2}, "dcn_data_parallelism=2, .* the product must be the number of 1 slices"),
    ],
)
def test_a_mesh_that_does_not_fit_the_devices(ici, dcn, message: str):
    with pytest.raises(ValueError, match=message):
        make_mesh(AXES, dict(zip(AXES, ici, strict=True)), dcn)


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ([["embedd", "fsdp"]], "'embedd' is no logical axis; did you mean 'embed'"),
        ([["embed", "fdsp"]], r"'embed' maps to 'fdsp', which is not in mesh_axes=\['data', 'fsdp', 'tensor'\]"),
        ([["embed"]], r"\['embed'\] is not a pair"),
    ],
)
def test_wrong_rules_are_named(rules, message: str):
    with pytest.raises(ValueError, match=message):
        Layout(mesh(2, 2, 2), rules)


def test_one_mesh_axis_for_two_dimensions_is_an_error():
    with pytest.raises(
        ValueError, match=r"axes \['embed', 'heads'\] would be split twice over 'fsdp', by \['embed', 'heads'\]"
    ):
        Layout(mesh(1, 8, 1), [["embed", "fsdp"], ["heads", ["fsdp", "tensor"]]]).specs(unet(parity.SD1))


def test_a_dimension_that_does_not_divide_falls_to_another():
    eight, rules = mesh(1, 8, 1), [["conv_out", "fsdp"], ["embed", "fsdp"]]
    conv = (None, None, "conv_in", "conv_out")
    assert parameter_spec((3, 3, 320, 640), conv, rules, eight) == P(None, None, None, "fsdp")
    assert parameter_spec((3, 3, 320, 4), conv, rules, eight) == P(None, None, "fsdp", None)
    assert parameter_spec((3, 3, 4, 4), conv, rules, eight) == P(None, None, None, None)
    assert parameter_spec((12, 64), ("embed", None), rules, eight) == P(None, "fsdp")


def test_an_update_is_split_over_data_too():
    split = lambda shape, spec, *sizes: update_spec(shape, spec, mesh(*sizes))
    out = P(None, None, None, "fsdp")
    assert split((3, 3, 64, 32), out, 4, 2, 1) == P(None, None, "data", "fsdp")
    assert split((3, 3, 4, 32), out, 4, 2, 1) == P(None, None, "data", "fsdp")
    assert split((3, 3, 3, 32), out, 4, 2, 1) == P(None, None, None, ("fsdp", "data"))
    assert split((3, 3, 3, 4), out, 4, 2, 1) == out
    assert split((3, 3, 3, 4), P(None, None, None, "tensor"), 2, 2, 2) == P(None, None, None, "tensor")
    assert split((64, 128), P(None, None), 8, 1, 1) == P(None, "data")
    assert split((7,), P(None), 8, 1, 1) == P(None)
    assert split((64, 128), P("fsdp", None), 1, 8, 1) == P("fsdp", None)
    assert split((64, 128), P(None, ("data", "fsdp")), 4, 2, 1) == P(None, ("data", "fsdp"))


@pytest.mark.parametrize("config", [parity.SD1, parity.SD2, parity.SDXL])
@pytest.mark.parametrize("sizes", [(8, 1, 1), (4, 2, 1)])
def test_updates_take_their_share_of_a_device(config: dict, sizes):
    network = unet(config)
    shardings = dict(flatten(Layout(mesh(*sizes), MAXDIFFUSION_RULES).update_shardings(network)))
    per_device = sum(np.prod(shardings[path].shard_shape(spec.shape)) for path, spec in network.specs.items())
    assert per_device == pytest.approx(network.num_parameters() / 8, rel=0.01)


def test_activations_take_the_first_rule_that_fits():
    rules = [["conv_batch", ["data", "fsdp"]], ["conv_batch", "data"], ["out_channels", "tensor"]]
    axes = ("conv_batch", "height", "width", "out_channels")
    assert activation_spec((8, 4, 4, 32), axes, rules, mesh(2, 2, 2)) == P(("data", "fsdp"), None, None, "tensor")
    assert activation_spec((2, 4, 4, 33), axes, rules, mesh(2, 2, 2)) == P("data", None, None, None)


@pytest.mark.parametrize("config", [parity.SD1, parity.SD2, parity.SDXL])
def test_maxdiffusions_rules_split_everything_large(config: dict):
    network = unet(config)
    layout = Layout(mesh(1, 8, 1), MAXDIFFUSION_RULES, max_replicated_mib=0.1)
    shardings = dict(flatten(layout.shardings(network)))
    per_device = sum(4 * np.prod(shardings[path].shard_shape(spec.shape)) for path, spec in network.specs.items())
    assert per_device == pytest.approx(4 * network.num_parameters() / 8, rel=0.01)


def test_a_large_parameter_that_lies_whole_is_an_error_and_small_ones_are_listed():
    network = unet(parity.SD1)
    with pytest.raises(ValueError, match=r"leave .*conv.kernel \(3, 3, .* whole on every device \(max_replicated_mib=10\)"):
        Layout(mesh(1, 8, 1), [["embed", "fsdp"]], max_replicated_mib=10).specs(network)
    lines = Layout(mesh(1, 8, 1), [["embed", "fsdp"]], max_replicated_mib=0).describe(network)
    assert lines[0] == "mesh {'data': 1, 'fsdp': 8, 'tensor': 1}: 8 devices"
    assert "P('fsdp', None): 135 parameters, 740.3 MiB, 92.5 MiB a device" in "\n".join(lines)
    assert lines[-1].startswith("whole on every device: conv_in.kernel, ")
    # Data parallelism alone replicates by design.
    assert Layout(mesh(8, 1, 1), MAXDIFFUSION_RULES, max_replicated_mib=0.1).specs(network)


def test_weights_go_from_the_file_to_their_shards(folders: dict[str, Path]):
    checkpoint = open_checkpoint(folders["sd1"])
    config = checkpoint.config("unet")
    assert config is not None
    network = make_network("unet", config)
    layout = Layout(mesh(2, 2, 2), MAXDIFFUSION_RULES)
    params = load_params(network, *checkpoint.tensors("unet"), placement=layout.place)
    whole = load_params(network, *checkpoint.tensors("unet"))
    assert jax.tree.all(jax.tree.map(lambda p, s: p.sharding == s, params, layout.shardings(network)))
    assert jax.tree.all(jax.tree.map(np.array_equal, params, whole))
