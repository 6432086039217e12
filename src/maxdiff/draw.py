"""Prompts to images, as a pure function of weights and request.

A request is a dict of arrays [n ...], one row for each image: seed uint32 [n], which alone decides its noise; input_ids
int32 [n 77] and, for SDXL, input_ids_2; where the image is guided away from a negative prompt, negative_ids (and
negative_ids_2), and negative_zeros bool [n], where there is none and the text is zeros. Where it begins with an image,
image uint8 [n h w 3], and for an inpainting model mask float32 [n h w 1], 1 where the image is drawn anew. latents
float32 [n h/8 w/8 c], standard normal, may stand for the seed's noise. So an image is the same alone, in any batch and
on any mesh.
"""

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from maxdiff.conditioning import encode_text, guidance_embedding, size_conditioning
from maxdiff.diffusion.objective import Purpose
from maxdiff.diffusion.sampler import begin, guided, make_plan, sample
from maxdiff.diffusion.sampler_config import sampler_name
from maxdiff.losses import from_uint8, to_uint8
from maxdiff.models.network import Network, Params
from maxdiff.weights.tokenizer import CLIPTokenizer

if TYPE_CHECKING:
    from maxdiff.pipeline import Pipeline

Request = Mapping[str, Any]
Draw = Callable[[Mapping[str, Params], Request], jax.Array]
# Text states [n 77 d], and SDXL's added conditioning.
Condition = tuple[jax.Array, dict[str, jax.Array] | None]


@dataclasses.dataclass(frozen=True)
class DrawConfig:
    """How images are drawn.

    Attributes:
        height, width: in pixels; multiples of the autoencoder's pixels per latent (8).
        num_inference_steps: of the sampler.
        guidance_scale: of classifier-free guidance; at 1 and below there is none.
        guidance_rescale: see `guided`.
        sampler: one of diffusion.solvers.SAMPLERS; None for the one that the scheduler's configuration names.
        eta: of DDIM.
        clip_skip: last layers of the text encoders that are passed over, besides those that the model always does; for
            what the image is guided towards alone.
        strength: with images to begin with, the share of the steps that are made; None without such images.
        vae_slicing: decode image by image.
    """

    height: int
    width: int
    num_inference_steps: int = 50
    guidance_scale: float = 7.5
    guidance_rescale: float = 0.0
    sampler: str | None = None
    eta: float = 0.0
    clip_skip: int = 0
    strength: float | None = None
    vae_slicing: bool = False


def draw_function(networks: Mapping[str, Network], scheduler: Mapping[str, Any], config: DrawConfig) -> Draw:
    """draw(weights, request) -> images uint8 [n h w 3]; pure, to be jitted.

    Args:
        networks: unet, vae, text_encoder and, for SDXL, text_encoder_2; `weights` has their parameters by the same
            names. On a mesh it is for `gradients.outputs_function`: left to itself XLA may split channels over the devices
            rather than images, moving activations all the time.
        scheduler: diffusers' scheduler_config.json.

    Raises:
        ValueError: for a size that is no whole number of latents, a network that draws in another way (editing), or what
            the schedule does not allow; when called, for guidance without negative_ids.
    """
    _check(networks, config)
    unet, vae = networks["unet"], exact_vae(networks)
    sampler, strength = config.sampler or sampler_name(scheduler), 1.0 if config.strength is None else config.strength
    plan = make_plan(scheduler, sampler, config.num_inference_steps, eta=config.eta, strength=strength)
    latent = (config.height // vae.config.downscale, config.width // vae.config.downscale, vae.config.latent_channels)
    factor = vae.config.scaling_factor
    # A model that has learnt to answer as guidance would is told the scale instead.
    distilled = unet.config.time_cond_proj_dim

    def draw(weights: Mapping[str, Params], request: Request) -> jax.Array:
        check_given(networks, image="image" in request, mask="mask" in request)
        _check_request(request, config, vae)
        encode = lambda images: vae.apply(weights["vae"], images, method="encode").mean * factor
        keys = jax.vmap(jax.random.key)(request["seed"])
        added = _inpainting(encode, request) if inpaints(networks) else []
        told = {}
        if distilled is not None:
            told = {"timestep_cond": guidance_embedding(config.guidance_scale, distilled, len(keys))}

        def predict(x: jax.Array, t: jax.Array, condition: Any) -> jax.Array:
            (states, conditioning), extra, more = condition
            return unet.apply(weights["unet"], jnp.concatenate([x, *extra], axis=-1), t, states, conditioning, **more)

        scale = config.guidance_scale if distilled is None else 1.0
        positive = _condition(networks, weights, request, "input_ids", config)
        negative = _negative(networks, weights, request, config) if scale > 1 else positive
        denoise = guided(predict, (positive, added, told), (negative, added, told), scale, config.guidance_rescale)
        noise = request["latents"] if "latents" in request else initial_latents(keys, latent)
        # With an inpainting model, full strength begins with noise alone.
        of_image = config.strength is not None and (config.strength < 1 or not added)
        first = begin(plan, noise, encode(from_uint8(request["image"])) if of_image else None)
        latents = sample(denoise, first, plan, lambda step: step_noise(keys, step, latent)) / factor
        decode = lambda x: vae.apply(weights["vae"], x, method="decode").astype(jnp.float32)
        return to_uint8(jax.lax.map(lambda x: decode(x[None])[0], latents) if config.vae_slicing else decode(latents))

    return draw


@functools.lru_cache(maxsize=8)
def compiled_draw(networks: tuple[tuple[str, Network], ...], scheduler: str, config: DrawConfig) -> Draw:
    """`draw_function` jitted, and made once; `scheduler` is JSON."""
    return jax.jit(draw_function(dict(networks), json.loads(scheduler), config))


def requests(
    pipeline: "Pipeline", prompts: Sequence[str], negative_prompts: Sequence[str] | None = None, *, seeds: Sequence[int]
) -> dict[str, np.ndarray]:
    """The request of these prompts, without images to begin with.

    Args:
        negative_prompts: one for each prompt. An empty one is the text of no words or, in a pipeline that asks for it
            (force_zeros_for_empty_prompt; SDXL's do), zeros in the text's place.
        seeds: one for each prompt, 0 to 2^32 - 1.

    Raises:
        ValueError: if the three are not of one length, or a seed is out of range.
    """
    given = list(negative_prompts or [""] * len(prompts))
    for name, values in (("negative prompts", given), ("seeds", seeds)):
        if len(values) != len(prompts):
            raise ValueError(f"{len(values)} {name} for {len(prompts)} prompts; allowed: one for each")
    for seed in seeds:
        check_seed(seed)
    request = {"seed": np.asarray(seeds, np.uint32)}
    if pipeline.text_encoder_2 is not None and pipeline.index.get("force_zeros_for_empty_prompt", True):
        request["negative_zeros"] = np.array([not negative for negative in given])
    for suffix, tokenizer in (("", pipeline.tokenizer), ("_2", pipeline.tokenizer_2)):
        if tokenizer is not None:
            request[f"input_ids{suffix}"] = tokenizer(prompts)
            request[f"negative_ids{suffix}"] = tokenizer(given)
    return request


def cut_prompts(tokenizer: CLIPTokenizer, texts: Iterable[str]) -> Iterator[str]:
    """A sentence for each text that has more tokens than are read."""
    for text in dict.fromkeys(texts):
        # A token has at least one byte.
        if len(text.encode()) > tokenizer.max_length - 2 and (rest := tokenizer.cut(text)):
            yield (f"{text[:40]!r}... has {tokenizer.length(text)} tokens, and {tokenizer.max_length} are read; "
                   f"this is cut off: {rest!r}")  # fmt: skip


def check_seed(seed: int) -> None:
    """Raise ValueError for a seed that is out of range."""
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed={seed} is out of range (allowed: 0 to {2**32 - 1})")


def initial_latents(keys: jax.Array, shape: tuple[int, int, int]) -> jax.Array:
    """Standard normal float32 [n *shape], each image's from its own key, jax.random.key(seed)."""
    return _normal(keys, Purpose.INITIAL_LATENTS, 0, shape)


def step_noise(keys: jax.Array, step: Any, shape: tuple[int, int, int]) -> jax.Array:
    """What a stochastic sampler adds at a step (its number, int32 []); like `initial_latents` each image's own."""
    return _normal(keys, Purpose.SAMPLER_STEP, step, shape)


def _normal(keys: jax.Array, purpose: Purpose, step: Any, shape: tuple[int, ...]) -> jax.Array:
    keys = jax.vmap(lambda key: jax.random.fold_in(jax.random.fold_in(key, int(purpose)), step))(keys)
    return jax.vmap(lambda key: jax.random.normal(key, shape, jnp.float32))(keys)


def _condition(
    networks: Mapping[str, Network], weights: Mapping[str, Params], request: Request, name: str, config: DrawConfig
) -> Condition:
    ids = {key.replace(name, "input_ids"): value for key, value in request.items() if key.startswith(name)}
    # As in diffusers, what the image is guided away from is read whole.
    states, pooled = encode_text(networks, weights, ids, config.clip_skip if name == "input_ids" else 0)
    if pooled is None:
        return states, None
    size = (config.height, config.width)
    whole = jnp.broadcast_to(jnp.array([size], jnp.int32), (states.shape[0], 2))
    return states, size_conditioning(pooled, whole, jnp.zeros_like(whole), size)


def _negative(
    networks: Mapping[str, Network], weights: Mapping[str, Params], request: Request, config: DrawConfig
) -> Condition:
    """What the image is guided away from."""
    if "negative_ids" not in request:
        raise ValueError(
            f"guidance_scale={config.guidance_scale} needs negative_ids in the request, if only of the empty prompt"
        )
    states, added = _condition(networks, weights, request, "negative_ids", config)
    if added is None or "negative_zeros" not in request:
        return states, added
    # SDXL was trained with zeros for no text; the sizes stay.
    zeros = request["negative_zeros"][:, None]
    blank = lambda x, where: jnp.where(where, jnp.zeros_like(x), x)
    return blank(states, zeros[..., None]), {**added, "text_embeds": blank(added["text_embeds"], zeros)}


def inpaints(networks: Mapping[str, Network]) -> bool:
    """Whether the UNet is also shown a mask and the image around it."""
    return networks["unet"].config.in_channels == 2 * networks["vae"].config.latent_channels + 1


def usual_strength(networks: Mapping[str, Network]) -> float:
    """How much of an image is changed if nothing is said: all that a mask shows, else most."""
    return 1.0 if inpaints(networks) else 0.8


def check_given(networks: Mapping[str, Network], *, image: bool, mask: bool) -> None:
    """Raise ValueError unless an image to begin with and a mask are given to a model that takes them."""
    if inpaints(networks) and not (image and mask):
        raise ValueError("mask is given without image" if mask else "this is an inpainting model: mask is required, and image")
    if mask and not inpaints(networks):
        channels = networks["unet"].config.in_channels
        raise ValueError(f"mask is for inpainting models, whose unet has in_channels=9; this one has {channels}")


def _inpainting(encode: Callable[[jax.Array], jax.Array], request: Request) -> list[jax.Array]:
    """The mask [n h/8 w/8 1] and the latents of the image without what it hides, which the UNet sees beside its own."""
    mask = (request["mask"] >= 0.5).astype(jnp.float32)
    around = encode(from_uint8(request["image"]) * (1 - mask))
    stride = mask.shape[1] // around.shape[1]
    return [mask[:, ::stride, ::stride], around]


def exact_vae(networks: Mapping[str, Network]) -> Network:
    """The autoencoder; SDXL's in float32 where its configuration asks for that, as diffusers decodes it."""
    vae = networks["vae"]
    upcast = "text_encoder_2" in networks and vae.config.force_upcast
    return vae.with_compute(dataclasses.replace(vae.compute, dtype=jnp.dtype(jnp.float32))) if upcast else vae


def _check_request(request: Request, config: DrawConfig, vae: Network) -> None:
    n, side, down = len(request["seed"]), (config.height, config.width), vae.config.downscale
    latent = (n, side[0] // down, side[1] // down, vae.config.latent_channels)
    for name, shape in (("image", (n, *side, 3)), ("mask", (n, *side, 1)), ("latents", latent)):
        if name in request and request[name].shape != shape:
            raise ValueError(f"{name} of shape {list(request[name].shape)} is not supported; allowed: {list(shape)}")
    if config.strength is not None and "image" not in request:
        raise ValueError(f"strength={config.strength} is of a change of an image, and none is given")


def _check(networks: Mapping[str, Network], config: DrawConfig) -> None:
    unet, vae = networks["unet"].config, networks["vae"].config
    if unet.in_channels != vae.latent_channels and not inpaints(networks):
        raise ValueError(
            f"the unet's in_channels={unet.in_channels} are those of a model for editing; allowed: the vae's "
            f"latent_channels={vae.latent_channels}, or {2 * vae.latent_channels + 1} for inpainting"
        )
    if unet.out_channels != vae.latent_channels:
        raise ValueError(f"the unet's out_channels={unet.out_channels} are not supported; allowed: {vae.latent_channels}")
    for key in ("guidance_scale", "guidance_rescale", "eta"):
        value = getattr(config, key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"{key}={value!r} is no finite number")
    for key in ("height", "width"):
        pixels = getattr(config, key)
        if pixels < 1 or pixels % vae.downscale:
            raise ValueError(f"{key}={pixels} is not supported; allowed: positive multiples of {vae.downscale}")
    for name, network in networks.items():
        layers = getattr(network.config, "num_hidden_layers", None)
        if layers is not None and not 0 <= config.clip_skip < layers - ("text_encoder_2" in networks):
            raise ValueError(f"clip_skip={config.clip_skip} is too many for the {name}'s {layers} layers")
    if inpaints(networks) and config.strength is None:
        raise ValueError(
            f"the unet's in_channels={unet.in_channels} are those of an inpainting model: image and mask are needed"
        )
