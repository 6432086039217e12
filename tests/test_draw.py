"""Images against those of diffusers' pipelines, from the same noise and prompts; and on a mesh."""

import dataclasses
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from maxdiff import build
from maxdiff.conditioning import guidance_embedding
from maxdiff.draw import DrawConfig, draw_function, exact_vae, initial_latents, requests, step_noise
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
    classes = {"sdxl": diffusers.StableDiffusionXLPipeline, "inpaint": diffusers.StableDiffusionInpaintPipeline}
    for kind in ("sd1", "sd2", "sdxl", "inpaint"):
        cls = classes.get(kind, diffusers.StableDiffusionPipeline)
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


def compiled(draw: Any, *args: Any) -> Any:
    # Barely optimised: it compiles in a quarter of the time.
    return jax.jit(draw).lower(*args).compile({"xla_backend_optimization_level": 0})


def drawn(pipeline: Pipeline, request: dict, config: DrawConfig) -> np.ndarray:
    networks, weights = parts(pipeline)
    return np.asarray(compiled(draw_function(networks, pipeline.scheduler, config), weights, request)(weights, request))


def as_diffusers(theirs: Any, config: DrawConfig, prompts: list[str], negative: list[str] | None = None) -> np.ndarray:
    scale = theirs.vae_scale_factor
    keys = jax.vmap(jax.random.key)(jnp.arange(len(prompts), dtype=jnp.uint32))
    noise = initial_latents(keys, (config.height // scale, config.width // scale, 4))
    latents = torch.from_numpy(np.array(noise)).permute(0, 3, 1, 2)
    images = theirs(prompts, negative_prompt=negative, latents=latents, height=config.height, width=config.width,
                    num_inference_steps=config.num_inference_steps, guidance_scale=config.guidance_scale, output_type="pil").images  # fmt: skip
    return np.stack([np.asarray(image) for image in images])


NEGATIVE = PROMPTS[2:]
COLLECTIVES = "all-gather|all-reduce|reduce-scatter|collective-permute|all-to-all"


def as_diffusers_changes(theirs: Any, config: DrawConfig, images: np.ndarray, masks: np.ndarray | None) -> np.ndarray:
    """Of image-to-image or, with masks, inpainting; the autoencoder's mean stands for its sample, as with us."""
    torch_of = lambda x: torch.from_numpy(np.array(x)).permute(0, 3, 1, 2)
    given: dict[str, Any] = {"image": torch_of(images).float() / 255}
    pipeline, module = theirs, "inpaint"
    if masks is None:
        pipeline, module = diffusers.StableDiffusionImg2ImgPipeline.from_pipe(theirs), "img2img"
        pipeline.set_progress_bar_config(disable=True)
    else:
        given |= {"mask_image": torch_of(masks), "height": config.height, "width": config.width}
    keys, scale = jax.vmap(jax.random.key)(jnp.arange(len(images), dtype=jnp.uint32)), theirs.vae_scale_factor
    noise = torch_of(initial_latents(keys, (config.height // scale, config.width // scale, 4)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(diffusers.models.autoencoders.vae.DiagonalGaussianDistribution, "sample", lambda self, *_: self.mean)
        name = f"diffusers.pipelines.stable_diffusion.pipeline_stable_diffusion_{module}.randn_tensor"
        patch.setattr(name, lambda *_, **__: noise)
        # Where this version of diffusers looks for the norm, transformers has it no more.
        norm = SimpleNamespace(final_layer_norm=theirs.text_encoder.final_layer_norm)
        patch.setattr(theirs.text_encoder, "text_model", norm, raising=False)
        found = pipeline(PROMPTS[: len(images)], strength=config.strength, num_inference_steps=config.num_inference_steps,
                         guidance_scale=config.guidance_scale, output_type="pil", clip_skip=config.clip_skip, **given).images  # fmt: skip
    return np.stack([np.asarray(image) for image in found])


@pytest.mark.parametrize("kind", ["sd1", "inpaint"])
def test_changed_images_equal_diffusers(vivid, kind: str):
    theirs, ours = vivid[kind]
    config = DrawConfig(**SIZE, num_inference_steps=4, strength=0.5 if kind == "sd1" else 1.0, clip_skip=1)
    rng = np.random.default_rng(0)
    images = rng.integers(0, 255, (2, config.height, config.width, 3), np.uint8)
    masks = None
    request = {**requests(ours, PROMPTS[:2], seeds=[0, 1]), "image": images}
    if kind == "inpaint":
        masks = np.zeros((2, config.height, config.width, 1), np.float32)
        masks[:, 10:, :20] = 1
        request["mask"] = masks
    found = drawn(ours, request, config)
    expected = as_diffusers_changes(theirs, config, images, masks)
    assert expected.std() > 20
    assert (np.abs(found.astype(int) - expected) <= 1).mean() >= 0.999


@pytest.mark.parametrize(
    ("kind", "scale", "negative"),
    [("sd1", 7.5, NEGATIVE), ("sd2", 1.0, None), ("sdxl", 7.5, None)],  # each compiles for ten seconds
)
def test_images_equal_diffusers(vivid, kind: str, scale: float, negative: list[str] | None):
    theirs, ours = vivid[kind]
    config = DrawConfig(**SIZE, num_inference_steps=3, guidance_scale=scale)
    found = drawn(ours, requests(ours, PROMPTS[:2], negative, seeds=[0, 1]), config)
    expected = as_diffusers(theirs, config, PROMPTS[:2], negative)
    assert found.dtype == np.uint8
    assert found.shape == expected.shape
    assert expected.std() > 20  # not all grey
    assert (np.abs(found.astype(int) - expected) <= 1).mean() >= 0.999


def test_an_image_is_the_same_alone_and_in_a_batch_on_a_mesh(vivid):
    _, ours = vivid["sd1"]
    config = DrawConfig(height=16, width=16, num_inference_steps=2)
    request = requests(ours, PROMPTS, seeds=[5, 6, 7, 8])
    alone = drawn(ours, requests(ours, PROMPTS[2:3], seeds=[7]), config)

    mesh = make_mesh(AXES, {"data": 2, "fsdp": 2, "tensor": 1}, {}, devices=jax.devices()[:4])
    layout = Layout(mesh, MAXDIFFUSION_RULES)
    networks, weights = parts(ours)
    weights = {name: jax.device_put(tree, layout.shardings(networks[name])) for name, tree in weights.items()}
    request = jax.device_put(request, NamedSharding(mesh, P(("data", "fsdp"))))
    args = weights, {}, request
    function = draw_function(networks, ours.scheduler, config)
    draw = compiled(build.drawing_on(layout, networks, function), *args)
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
    abstract = jax.eval_shape(lambda: (weights, requests(ours, PROMPTS, seeds=range(4))))
    closed = jax.make_jaxpr(draw)(*abstract)
    assert sum(np.size(c) for c in closed.consts) < 1000
    assert closed.out_avals[0].str_short() == "uint8[4,32,48,3]"


def test_a_stochastic_samplers_noise_is_each_images_and_each_steps_own():
    keys, shape = jax.vmap(jax.random.key)(jnp.arange(4, dtype=jnp.uint32)), (2, 3, 4)
    draws = [step_noise(keys, jnp.int32(number), shape) for number in (0, 1)]
    draws.append(initial_latents(keys, shape))
    assert len(np.unique(np.stack(draws))) == 3 * 4 * 24
    np.testing.assert_array_equal(step_noise(keys[2:3], jnp.int32(1), shape)[0], draws[1][2])


def test_sdxls_autoencoder_is_exact_where_it_asks_for_that(vivid):
    for kind, expected in (("sd1", "bfloat16"), ("sdxl", "float32")):
        networks = parts(vivid[kind][1])[0]
        vae = networks["vae"].with_compute(Compute(dtype=jnp.dtype(jnp.bfloat16)))
        assert vae.config.force_upcast == (kind == "sdxl")
        assert exact_vae({**networks, "vae": vae}).compute.dtype == expected


def test_the_guidance_that_a_distilled_unet_is_told_equals_diffusers():
    theirs = diffusers.LatentConsistencyModelPipeline.get_guidance_scale_embedding
    for scale, width in ((1.0, 256), (8.5, 256), (3.0, 7)):
        expected = theirs(None, torch.tensor([scale - 1] * 2), embedding_dim=width).numpy()
        np.testing.assert_allclose(guidance_embedding(scale, width, 2), expected, atol=1e-3)  # sines of thousands, in float32


def test_requests(vivid):
    sd1, sdxl = vivid["sd1"][1], vivid["sdxl"][1]
    seeds = [3, 4, 5, 2**32 - 1]
    found = requests(sd1, PROMPTS, seeds=seeds)
    assert set(found) == {"seed", "input_ids", "negative_ids"}
    np.testing.assert_array_equal(found["seed"], seeds)
    found = requests(sdxl, PROMPTS, ["", "x", "", "y"], seeds=seeds)
    np.testing.assert_array_equal(found["negative_zeros"], [True, False, True, False])
    encoded = dataclasses.replace(sdxl, index={"force_zeros_for_empty_prompt": False})
    assert "negative_zeros" not in requests(encoded, PROMPTS, seeds=seeds)
    with pytest.raises(ValueError, match="3 negative prompts for 4 prompts; allowed: one for each"):
        requests(sdxl, PROMPTS, [""] * 3, seeds=seeds)
    with pytest.raises(ValueError, match="1 seeds for 4 prompts"):
        requests(sdxl, PROMPTS, seeds=[0])
    with pytest.raises(ValueError, match=r"seed=-1 is out of range \(allowed: 0 to 4294967295\)"):
        requests(sdxl, PROMPTS[:1], seeds=[-1])


def test_a_guided_image_needs_something_to_be_guided_from(vivid):
    _, ours = vivid["sd1"]
    networks, weights = parts(ours)
    request = {key: value for key, value in requests(ours, PROMPTS, seeds=range(4)).items() if key != "negative_ids"}
    draw = draw_function(networks, ours.scheduler, DrawConfig(**SIZE))
    with pytest.raises(ValueError, match="guidance_scale=7.5 needs negative_ids in the request"):
        jax.eval_shape(draw, weights, request)


@pytest.mark.parametrize(
    ("unet", "config", "scheduler", "message"),
    [
        ({"in_channels": 9}, {}, {}, "in_channels=9 are those of an inpainting model: image and mask are needed"),
        ({"out_channels": 8}, {}, {}, "out_channels=8 are not supported; allowed: 4"),
        (
            {"in_channels": 8},
            {},
            {},
            "in_channels=8 are those of a model for editing; allowed: the vae's latent_channels=4, or 9",
        ),
        ({}, {"clip_skip": 2}, {}, "clip_skip=2 is too many for the text_encoder's 2 layers"),
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
