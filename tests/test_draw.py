"""Images against those of diffusers' pipelines, from the same noise and prompts; and on a mesh."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import diffusers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from maxdiff.draw import DrawConfig, draw_function, initial_latents, requests, step_noise
from maxdiff.models.layers import Compute
from maxdiff.models.network import Network
from maxdiff.models.unet import UNet2DConditionModel
from maxdiff.pipeline import Pipeline
from maxdiff.sharding import Layout, make_mesh
from tests.test_sharding import AXES, MAXDIFFUSION_RULES

PROMPTS = ["a cat in a hat", "two red boats", "a very old house", ""]
SIZE = {"height": 32, "width": 48}  # not square: height and width have an order


@pytest.fixture(scope="module")
def vivid(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Pipeline]]:
    """kind -> (diffusers' pipeline, ours), random, but so loud that images show the UNet and the text."""
    result = {}
    for kind in ("sd1", "sd2", "sdxl"):
        cls = diffusers.StableDiffusionXLPipeline if kind == "sdxl" else diffusers.StableDiffusionPipeline
        theirs = cls.from_pretrained(folders[kind])
        theirs.set_progress_bar_config(disable=True)
        with torch.no_grad():
            theirs.unet.conv_out.weight *= 8
            for name, weight in theirs.unet.named_parameters():
                if name.endswith("attn2.to_out.0.weight"):
                    weight *= 20
        folder = tmp_path_factory.mktemp("vivid") / kind
        theirs.save_pretrained(folder)
        result[kind] = theirs, Pipeline.load(folder)
    return result


def parts(pipeline: Pipeline) -> tuple[dict, dict]:
    """Networks and their weights, by name."""
    networks = {name: part.network for name, part in pipeline.networks()}
    return networks, {name: part.params for name, part in pipeline.networks()}


def compiled(pipeline: Pipeline, config: DrawConfig, *args: Any, compute: Compute | None = None) -> Any:
    networks = {name: network.with_compute(compute or Compute()) for name, network in parts(pipeline)[0].items()}
    draw = jax.jit(draw_function(networks, pipeline.scheduler, config))
    # Barely optimised: it compiles in a quarter of the time.
    return draw.lower(*args).compile({"xla_backend_optimization_level": 0})


def drawn(pipeline: Pipeline, request: dict, config: DrawConfig) -> np.ndarray:
    args = parts(pipeline)[1], jax.random.key(0), request
    return np.asarray(compiled(pipeline, config, *args)(*args))


def as_diffusers(theirs: Any, config: DrawConfig, prompts: list[str], negative: list[str] | None = None) -> np.ndarray:
    scale = theirs.vae_scale_factor
    noise = initial_latents(jax.random.key(0), jnp.arange(len(prompts)), (config.height // scale, config.width // scale, 4))
    latents = torch.from_numpy(np.array(noise)).permute(0, 3, 1, 2)
    images = theirs(prompts, negative_prompt=negative, latents=latents, height=config.height, width=config.width,
                    num_inference_steps=config.num_inference_steps, guidance_scale=config.guidance_scale, output_type="pil").images  # fmt: skip
    return np.stack([np.asarray(image) for image in images])


NEGATIVE = PROMPTS[2:]
COLLECTIVES = "all-gather|all-reduce|reduce-scatter|collective-permute|all-to-all"


@pytest.mark.parametrize(
    ("kind", "scale", "negative"),
    [("sd1", 7.5, NEGATIVE), ("sd2", 1.0, None), ("sdxl", 7.5, None)],  # each compiles for ten seconds
)
def test_images_equal_diffusers(vivid, kind: str, scale: float, negative: list[str] | None):
    theirs, ours = vivid[kind]
    config = DrawConfig(**SIZE, num_inference_steps=3, guidance_scale=scale)
    found = drawn(ours, requests(ours, PROMPTS[:2], negative), config)
    expected = as_diffusers(theirs, config, PROMPTS[:2], negative)
    assert found.dtype == np.uint8
    assert found.shape == expected.shape
    assert expected.std() > 20  # not all grey
    assert (np.abs(found.astype(int) - expected) <= 1).mean() >= 0.999


def test_an_image_is_the_same_alone_and_in_a_batch_on_a_mesh(vivid):
    _, ours = vivid["sd1"]
    config = DrawConfig(height=16, width=16, num_inference_steps=2)
    request = requests(ours, PROMPTS, first=5)
    alone = drawn(ours, requests(ours, PROMPTS[2:3], first=7), config)

    mesh = make_mesh(AXES, {"data": 2, "fsdp": 2, "tensor": 1}, {}, devices=jax.devices()[:4])
    layout = Layout(mesh, MAXDIFFUSION_RULES)
    networks, weights = parts(ours)
    weights = {name: jax.device_put(tree, layout.shardings(networks[name])) for name, tree in weights.items()}
    request = jax.device_put(request, NamedSharding(mesh, P(("data", "fsdp"))))
    args = weights, jax.device_put(jax.random.key(0), NamedSharding(mesh, P())), request
    draw = compiled(ours, config, *args, compute=Compute(gather=layout.gather, constrain=layout.constrain))
    # Each device draws its own image, in the guided network as two halves; nothing but weights goes between devices.
    text = draw.as_text()
    assert set(re.findall(r"= f32\[(\d+),\d+,\d+,\d+\]\S* convolution\(", text)) == {"1", "2"}
    assert set(re.findall(rf" ({COLLECTIVES})\(", text)) == {"all-gather"}
    images = np.asarray(draw(*args))
    assert images.shape == (4, 16, 16, 3)
    assert np.abs(images[2:3].astype(int) - alone).max() <= 1
    assert np.abs(images[1:2].astype(int) - alone).max() > 1


def test_no_weights_hide_in_the_program(vivid):
    """Weights, the text encoders' too, are arguments: as constants they would be compiled in, gigabytes of them."""
    _, ours = vivid["sd1"]
    networks, weights = parts(ours)
    draw = draw_function(networks, ours.scheduler, DrawConfig(**SIZE, num_inference_steps=2))
    abstract = jax.eval_shape(lambda: (weights, jax.random.key(0), requests(ours, PROMPTS)))
    closed = jax.make_jaxpr(draw)(*abstract)
    assert sum(np.size(c) for c in closed.consts) < 1000
    assert closed.out_avals[0].str_short() == "uint8[4,32,48,3]"


def test_a_stochastic_samplers_noise_is_each_images_and_each_steps_own():
    key, shape = jax.random.key(0), (2, 3, 4)
    draws = [step_noise(key, jnp.arange(4), shape, jnp.int32(number)) for number in (0, 1)]
    draws.append(initial_latents(key, jnp.arange(4), shape))
    assert len(np.unique(np.stack(draws))) == 3 * 4 * 24
    np.testing.assert_array_equal(step_noise(key, jnp.array([2]), shape, jnp.int32(1))[0], draws[1][2])


def test_requests(vivid):
    sd1, sdxl = vivid["sd1"][1], vivid["sdxl"][1]
    assert set(requests(sd1, PROMPTS)) == {"index", "input_ids", "negative_ids"}
    assert set(requests(sdxl, PROMPTS)) == {"index", "input_ids", "input_ids_2"}
    encoded = dataclasses.replace(sdxl, index={"force_zeros_for_empty_prompt": False})
    found = requests(encoded, PROMPTS, first=3)
    np.testing.assert_array_equal(found["negative_ids_2"], requests(sdxl, PROMPTS, [""] * 4)["negative_ids_2"])
    np.testing.assert_array_equal(found["index"], [3, 4, 5, 6])
    with pytest.raises(ValueError, match="3 negative prompts for 4 prompts; allowed: one for each, or none"):
        requests(sdxl, PROMPTS, [""] * 3)


def test_a_guided_image_needs_something_to_be_guided_from(vivid):
    _, ours = vivid["sd1"]
    networks, weights = parts(ours)
    request = {key: value for key, value in requests(ours, PROMPTS).items() if key != "negative_ids"}
    draw = draw_function(networks, ours.scheduler, DrawConfig(**SIZE))
    with pytest.raises(ValueError, match="guidance_scale=7.5 needs negative_ids in the request"):
        jax.eval_shape(draw, weights, jax.random.key(0), request)
    with pytest.raises(ValueError, match="must be jax.random.key"):
        jax.eval_shape(draw, weights, jax.random.key(0, impl="rbg"), requests(ours, PROMPTS))


@pytest.mark.parametrize(
    ("unet", "config", "scheduler", "message"),
    [
        ({"in_channels": 9}, {}, {}, "in_channels=9 are those of a model that draws into an image (inpainting, editing)"),
        ({"out_channels": 8}, {}, {}, "out_channels=8 are not supported; allowed: 4"),
        ({"time_cond_proj_dim": 256}, {}, {}, "time_cond_proj_dim=256: LCM models are not supported; allowed: null"),
        ({}, {"height": 33}, {}, "height=33 is not supported; allowed: positive multiples of 2"),
        ({}, {"width": 0}, {}, "width=0 is not supported"),
        ({}, {"num_inference_steps": 0}, {}, "num_inference_steps=0 must lie between 1 and num_train_timesteps=1000"),
        ({}, {}, {"timestep_spacing": "even"}, "timestep_spacing='even' is unknown"),
    ],
)
def test_what_cannot_be_drawn_is_said_first(vivid, unet: dict, config: dict, scheduler: dict, message: str):
    pipeline = vivid["sd1"][1]
    networks = parts(pipeline)[0]
    changed = Network(UNet2DConditionModel, dataclasses.replace(networks["unet"].config, **unet))
    with pytest.raises(ValueError, match=re.escape(message)):
        draw_function({**networks, "unet": changed}, {**pipeline.scheduler, **scheduler}, DrawConfig(**{**SIZE, **config}))
