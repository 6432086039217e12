"""Prompts to images, as a pure function of weights, key and request.

A request is a dict of arrays [n ...], one row for each image: index int32 [n], the image's number, which with the
key decides its noise; input_ids int32 [n 77] and, for SDXL, input_ids_2; and, where the image is guided away from a
negative prompt, negative_ids (and negative_ids_2). So image 7 is the same alone, in any batch and on any mesh.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxdiff.conditioning import encode_text, size_conditioning
from maxdiff.diffusion.objective import Purpose, purpose_keys
from maxdiff.diffusion.sampler import begin, guided, make_plan, sample
from maxdiff.losses import to_uint8
from maxdiff.models.network import Network, Params
from maxdiff.pipeline import Pipeline

Request = Mapping[str, jax.Array]
Draw = Callable[[Mapping[str, Params], jax.Array, Request], jax.Array]
# Text states [n 77 d], and SDXL's added conditioning.
Condition = tuple[jax.Array, dict[str, jax.Array] | None]


@dataclasses.dataclass(frozen=True)
class DrawConfig:
    """How images are drawn.

    Attributes:
        height, width: in pixels; multiples of the autoencoder's pixels per latent (8).
        num_inference_steps: of the sampler.
        guidance_scale: of classifier-free guidance; at 1 and below there is none.
        sampler: one of `diffusion.solvers.SAMPLERS`.
    """

    height: int
    width: int
    num_inference_steps: int = 50
    guidance_scale: float = 7.5
    sampler: str = "ddim"


def draw_function(networks: Mapping[str, Network], scheduler: Mapping[str, Any], config: DrawConfig) -> Draw:
    """draw(weights, key, request) -> images uint8 [n h w 3]; pure, to be jitted.

    Args:
        networks: unet, vae, text_encoder and, for SDXL, text_encoder_2; `weights` has their parameters by the same
            names. Where weights are split over a mesh, networks must gather them and constrain activations
            (`Compute.gather`, `Compute.constrain`), whatever the mesh's axes: else XLA may split channels over the
            devices rather than images, moving activations all the time.
        scheduler: diffusers' scheduler_config.json.

    Raises:
        ValueError: for a model that draws in another way (inpainting, LCM), a size that is no whole number of latents,
            or what the schedule does not allow; when called, for guidance without negative_ids (but SDXL's may be
            absent) and a key that is not threefry.
    """
    _check(networks, config)
    plan = make_plan(scheduler, config.sampler, config.num_inference_steps)
    vae = networks["vae"]
    latent = (config.height // vae.config.downscale, config.width // vae.config.downscale, vae.config.latent_channels)

    def draw(weights: Mapping[str, Params], key: jax.Array, request: Request) -> jax.Array:
        def predict(x: jax.Array, t: jax.Array, condition: Condition) -> jax.Array:
            return networks["unet"].apply(weights["unet"], x, t, *condition)

        positive = _condition(networks, weights, request, "input_ids", config)
        negative = positive
        if config.guidance_scale > 1:
            negative = _negative(networks, weights, request, positive, config)
        denoise = guided(predict, positive, negative, config.guidance_scale)
        x = begin(plan, initial_latents(key, request["index"], latent))
        latents = sample(denoise, x, plan, lambda number: step_noise(key, request["index"], latent, number))
        images = vae.apply(weights["vae"], latents / vae.config.scaling_factor, method="decode").astype(jnp.float32)
        return to_uint8(images)

    return draw


def requests(
    pipeline: Pipeline, prompts: Sequence[str], negative_prompts: Sequence[str] | None = None, *, first: int = 0
) -> dict[str, np.ndarray]:
    """The request of these prompts, for images number `first`, `first` + 1, ...

    Args:
        negative_prompts: one for each prompt. None is the empty prompt, or zeros in the text's place for a pipeline
            that asks for them (force_zeros_for_empty_prompt; SDXL's do): diffusers' rule.

    Raises:
        ValueError: if the two are not of one length.
    """
    if negative_prompts is not None and len(negative_prompts) != len(prompts):
        raise ValueError(f"{len(negative_prompts)} negative prompts for {len(prompts)} prompts; allowed: one for each, or none")
    request = {"index": np.arange(first, first + len(prompts), dtype=np.int32)}
    zeros = pipeline.text_encoder_2 is not None and pipeline.index.get("force_zeros_for_empty_prompt", True)
    if negative_prompts is None and not zeros:
        negative_prompts = [""] * len(prompts)
    for suffix, tokenizer in (("", pipeline.tokenizer), ("_2", pipeline.tokenizer_2)):
        if tokenizer is not None:
            request[f"input_ids{suffix}"] = tokenizer(prompts)
            if negative_prompts is not None:
                request[f"negative_ids{suffix}"] = tokenizer(negative_prompts)
    return request


def initial_latents(key: jax.Array, index: jax.Array, shape: tuple[int, int, int]) -> jax.Array:
    """Standard normal float32 [n *shape], each image's from the key and its number in index (int32 [n]) alone.

    Raises:
        ValueError: if the key is not threefry.
    """
    keys = purpose_keys(key, index, Purpose.INITIAL_LATENTS)
    return jax.vmap(lambda k: jax.random.normal(k, shape, jnp.float32))(keys)


def step_noise(key: jax.Array, index: jax.Array, shape: tuple[int, int, int], number: jax.Array) -> jax.Array:
    """What a stochastic sampler adds at step `number` (int32 []); like `initial_latents` each image's own."""
    keys = purpose_keys(key, index, Purpose.SAMPLER_STEP)
    return jax.vmap(lambda k: jax.random.normal(jax.random.fold_in(k, number), shape, jnp.float32))(keys)


def _condition(
    networks: Mapping[str, Network], weights: Mapping[str, Params], request: Request, name: str, config: DrawConfig
) -> Condition:
    ids = {key.replace(name, "input_ids"): value for key, value in request.items() if key.startswith(name)}
    states, pooled = encode_text(networks, weights, ids)
    if pooled is None:
        return states, None
    size = (config.height, config.width)
    whole = jnp.broadcast_to(jnp.array([size], jnp.int32), (states.shape[0], 2))
    return states, size_conditioning(pooled, whole, jnp.zeros_like(whole), size)


def _negative(
    networks: Mapping[str, Network],
    weights: Mapping[str, Params],
    request: Request,
    positive: Condition,
    config: DrawConfig,
) -> Condition:
    """What the image is guided away from."""
    if "negative_ids" in request:
        return _condition(networks, weights, request, "negative_ids", config)
    states, added = positive
    if added is None:
        raise ValueError(
            f"guidance_scale={config.guidance_scale} needs negative_ids in the request, if only of the empty prompt"
        )
    # SDXL was trained with zeros for no text; the sizes stay.
    return jnp.zeros_like(states), {**added, "text_embeds": jnp.zeros_like(added["text_embeds"])}


def _check(networks: Mapping[str, Network], config: DrawConfig) -> None:
    unet, vae = networks["unet"].config, networks["vae"].config
    if unet.in_channels != vae.latent_channels:
        raise ValueError(
            f"the unet's in_channels={unet.in_channels} are those of a model that draws into an image (inpainting, "
            f"editing), not from text alone; allowed: the vae's latent_channels={vae.latent_channels}"
        )
    if unet.out_channels != vae.latent_channels:
        raise ValueError(f"the unet's out_channels={unet.out_channels} are not supported; allowed: {vae.latent_channels}")
    if unet.time_cond_proj_dim is not None:
        raise ValueError(f"time_cond_proj_dim={unet.time_cond_proj_dim}: LCM models are not supported; allowed: null")
    for key in ("height", "width"):
        pixels = getattr(config, key)
        if pixels < 1 or pixels % vae.downscale:
            raise ValueError(f"{key}={pixels} is not supported; allowed: positive multiples of {vae.downscale}")
