"""Parts that are new, from sources of their own, or from nowhere."""

from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from maxdiff.models.network import flatten
from maxdiff.pipeline import Pipeline
from maxdiff.sharding import Layout, make_mesh
from maxdiff.weights.origins import open_origins
from tests.test_sharding import AXES, MAXDIFFUSION_RULES

VAE = {"block_out_channels": [16, 16], "down_block_types": ["DownEncoderBlock2D"] * 2, "up_block_types": ["UpDecoderBlock2D"] * 2,
       "norm_num_groups": 8}  # fmt: skip


def test_a_new_part_has_the_checkpoints_architecture_where_nothing_else_is_said(folders: dict[str, Path]):
    stored = Pipeline.load(folders["sd1"])
    new = Pipeline.load(folders["sd1"], new={"unet": {}}, seed=3)
    assert new.unet.network.config == stored.unet.network.config
    kernel = lambda pipeline: dict(flatten(pipeline.unet.params))["conv_in", "kernel"]
    assert not np.allclose(kernel(new), kernel(stored))
    assert jax.tree.all(jax.tree.map(np.array_equal, new.vae.params, stored.vae.params))
    origins = open_origins(folders["sd1"], new={"unet": {"layers_per_block": 2, "norm_num_groups": 16}})
    changed = origins.networks(["unet"])["unet"].config
    assert (changed.layers_per_block, changed.norm_num_groups) == (2, 16)
    assert changed.cross_attention_dim == stored.unet.network.config.cross_attention_dim


def test_new_weights_depend_on_the_seed_alone_not_on_the_mesh():
    layout = Layout(make_mesh(AXES, {"fsdp": 8}, {}), MAXDIFFUSION_RULES)
    origins = open_origins("", new={"vae": VAE})
    networks = origins.networks(["vae"])
    here, there, other = (
        origins.load(networks, seed=seed, placement=placement)["vae"]
        for seed, placement in ((1, None), (1, layout.place), (2, None))
    )
    assert jax.tree.all(jax.tree.map(np.array_equal, here, there))
    kernel = dict(flatten(there))["encoder", "conv_in", "kernel"]
    assert kernel.sharding == NamedSharding(layout.mesh, P(None, None, None, "fsdp"))
    assert not np.array_equal(kernel, dict(flatten(other))["encoder", "conv_in", "kernel"])


def test_what_nothing_is_said_of_is_stable_diffusions(folders: dict[str, Path]):
    origins = open_origins("", sources={"vae": folders["sd1"]}, prediction_type="v_prediction")
    assert origins.scheduler()["beta_schedule"] == "scaled_linear"
    assert origins.scheduler()["prediction_type"] == "v_prediction"
    assert origins.tokenizer("tokenizer")("cat")[0, 1] == 2368
    with pytest.raises(
        ValueError, match=r"nothing says where the unet comes from \(allowed: pretrained_model_name_or_path, unet_path"
    ):
        origins.networks(["unet"])


def test_a_wrong_architecture_is_named(folders: dict[str, Path]):
    origins = open_origins(folders["sd1"], new={"unet": {"layers_per_blok": 2}})
    with pytest.raises(ValueError, match="unet: layers_per_blok=2 is not supported"):
        origins.networks(["unet"])


def test_a_file_of_a_hub_repository_that_cannot_be_had():
    with pytest.raises(FileNotFoundError, match=r"there is no file a/b/c.safetensors; as a file on the hub: .* a/b"):
        open_origins("a/b/c.safetensors")
