"""A Stable Diffusion pipeline: its networks with their weights, tokenizers and noise schedule."""

import dataclasses
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from maxdiff.draw import DrawConfig, check_given, compiled_draw, cut_prompts, requests, usual_strength
from maxdiff.models.layers import Compute
from maxdiff.models.network import Network, Params, Placement, flatten
from maxdiff.weights import original
from maxdiff.weights.checkpoint import PARTS, TOKENIZERS
from maxdiff.weights.names import to_torch, to_torch_shape, torch_key
from maxdiff.weights.origins import open_origins
from maxdiff.weights.source import FromPt
from maxdiff.weights.tensors import SUFFIXES, Tensor, Tensors, write_json, write_safetensors
from maxdiff.weights.tokenizer import CLIPTokenizer

logger = logging.getLogger(__name__)

# File names in a diffusers folder, and which library loads the part.
WEIGHTS = {"unet": "diffusion_pytorch_model", "vae": "diffusion_pytorch_model",
           "text_encoder": "model", "text_encoder_2": "model"}  # fmt: skip
FLOATS = tuple(np.dtype(dtype) for dtype in (jnp.float32, jnp.bfloat16, jnp.float16))
# diffusers asks a pipeline which version wrote it, to warn of layouts that later changed.
DIFFUSERS_VERSION = "0.42.1"
PIPELINE_CLASSES = ("StableDiffusionPipeline", "StableDiffusionXLPipeline", "StableDiffusionInpaintPipeline",
                    "StableDiffusionXLInpaintPipeline")  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Part:
    """A network and its parameters.

    >>> text = pipeline.text_encoder(ids)
    >>> mean, logvar = pipeline.vae(images, method="encode")
    """

    network: Network
    params: Params

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the network on these parameters; compiled once for each shape of the inputs."""
        return self.network.jitted(self.params, *args, **kwargs)


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """Everything that turns text into an image.

    Attributes:
        unet, vae, text_encoder, text_encoder_2: networks with weights; the second text encoder is SDXL's.
        tokenizer, tokenizer_2: each for the encoder of its number.
        scheduler: diffusers' scheduler_config.json.
        index: the model_index.json it was loaded with, or {}.
    """

    unet: Part
    vae: Part
    text_encoder: Part
    tokenizer: CLIPTokenizer
    scheduler: dict[str, Any]
    text_encoder_2: Part | None = None
    tokenizer_2: CLIPTokenizer | None = None
    index: dict[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def load(
        cls,
        name: str | Path,
        *,
        revision: str | None = None,
        variant: str | None = None,
        from_pt: FromPt = "auto",
        sources: Mapping[str, str | Path] | None = None,
        new: Mapping[str, Mapping[str, Any]] | None = None,
        seed: int = 0,
        prediction_type: str | None = None,
        dtype: Any = jnp.float32,
        compute: Compute | None = None,
        placement: Placement | None = None,
    ) -> "Pipeline":
        """Load a pipeline from a diffusers folder, a hub repository or a single file.

        Args:
            name: a local folder or file if there is one, else a repository on the hub.
            revision: the branch, tag or commit, if `name` is a hub repository.
            variant: the infix of a second set of weights in `name`, such as fp16.
            from_pt: True for PyTorch weights in `name`, False for Flax weights, "auto" for what is there.
            sources: parts from elsewhere, part -> folder, repository or file: {"vae": "stabilityai/sd-vae-ft-mse"}.
                A source may be a whole pipeline or the part alone; a file of bare weights takes the
                configuration that `name` has for the part.
            new: parts that begin with random weights, part -> what of its architecture differs from the
                checkpoint's (diffusers' keys): {"unet": {"block_out_channels": [64, 128]}}. With these and
                `sources` for all parts, `name` may be "".
            seed: of new weights.
            prediction_type: `epsilon`, `v_prediction` or `sample`, over what the checkpoint says.
            dtype: of the parameters.
            compute: how the networks compute (dtype of activations, attention kernel, ...).
            placement: (path, spec) -> sharding of each parameter; by default the first device.

        Raises:
            FileNotFoundError: if a source or a file in it is missing.
            ValueError: if a file is damaged, a configuration or option unsupported, weights don't fit the
                configuration, or parts don't fit each other.
        """
        _check_dtype(dtype)
        origins = open_origins(name, revision=revision, variant=variant, from_pt=from_pt, sources=sources, new=new,
                               prediction_type=prediction_type)  # fmt: skip
        # All that is small first: a mistake is reported before gigabytes are read.
        networks = origins.networks(origins.names(), compute)
        tokenizers: dict[str, Any] = {part: origins.tokenizer(part) for part in TOKENIZERS[: len(networks) - 2]}
        check_fit(networks, tokenizers)
        scheduler = origins.scheduler()
        origins.check(networks)
        loaded = origins.load(networks, dtype=dtype, placement=placement, seed=seed)
        parts: dict[str, Any] = {part: Part(network, loaded[part]) for part, network in networks.items()}
        return cls(scheduler=scheduler, index=origins.index(), **parts, **tokenizers)

    def generate(
        self,
        prompts: str | Sequence[str],
        *,
        steps: int = 30,
        sampler: str | None = None,
        guidance_scale: float = 7.5,
        seed: int | Sequence[int] = 0,
        negative_prompt: str | Sequence[str] = "",
        height: int | None = None,
        width: int | None = None,
        latents: ArrayLike | None = None,
        image: ArrayLike | None = None,
        mask: ArrayLike | None = None,
        strength: float | None = None,
        timestep_spacing: str | None = None,
        use_karras_sigmas: bool | None = None,
        **options: Any,
    ) -> np.ndarray:
        """Draw prompts -> images uint8 [n height width 3]; compiled once for each number of prompts and setting.

        Args:
            steps: of the sampler.
            sampler: one of diffusion.solvers.SAMPLERS; by default the one that the scheduler's configuration names.
            guidance_scale: at 1 and below the image is not guided, at half the work.
            seed: of the first image, the others counting on from it, or one for each: 0 to 2^32 - 1.
            negative_prompt: for all, or one for each.
            height, width: pixels; by default what the UNet was trained at.
            latents: standard normal float32 [n height/8 width/8 c], instead of the seeds' noise.
            image: uint8 [n height width 3] to begin with.
            mask: float32 [n height width 1], 1 where the image is drawn anew; for inpainting models.
            strength: with an image, the share of the steps that are made, 0 to 1; by default 0.8, with a mask 1.
            timestep_spacing: leading, trailing or linspace, over what the scheduler's configuration says.
            use_karras_sigmas: likewise.
            options: guidance_rescale, eta, clip_skip and vae_slicing of `DrawConfig`.

        Raises:
            ValueError: naming what does not fit, before anything is drawn.
        """
        prompts = _texts("prompts", prompts)
        seeds = _seeds(seed, len(prompts))
        negative = _texts("negative_prompt", negative_prompt)
        negative = negative * len(prompts) if isinstance(negative_prompt, str) else negative
        height, width = (given or usual for given, usual in zip((height, width), self._size(), strict=True))
        networks = {name: part.network for name, part in self.networks()}
        check_given(networks, image=image is not None, mask=mask is not None)
        if image is not None and strength is None:
            strength = usual_strength(networks)
        schedule = {"timestep_spacing": timestep_spacing, "use_karras_sigmas": use_karras_sigmas}
        if unknown := set(options) - {"guidance_rescale", "eta", "clip_skip", "vae_slicing"}:
            raise ValueError(f"generate has no {min(unknown)}")
        config = DrawConfig(height, width, steps, guidance_scale, sampler=sampler, strength=strength, **options)
        request = requests(self, prompts, negative, seeds=seeds)
        given = {"latents": latents, "image": image, "mask": mask}
        request |= {name: _array(name, value) for name, value in given.items() if value is not None}
        for sentence in cut_prompts(self.tokenizer, [*prompts, *negative]):
            logger.warning(sentence)
        scheduler = {**self.scheduler, **{key: value for key, value in schedule.items() if value is not None}}
        program = compiled_draw(tuple(networks.items()), json.dumps(scheduler), config)
        return np.asarray(program({name: part.params for name, part in self.networks()}, request))

    def save(self, folder: str | Path, *, dtype: Any = None) -> None:
        """Write a diffusers folder that `from_pretrained` loads; `dtype` converts the weights.

        Each file appears whole or not at all, the weights first and model_index.json last. Older weights and
        tokenizers in the folder, which a loader might prefer, are removed; other files stay.

        Raises:
            ValueError: for a dtype that is not floating-point.
            OSError: if the disk is full or the folder not writable.
        """
        for name, part in self.networks():
            save_part(folder, name, part, dtype=dtype)
        self.save_small(folder)

    def save_small(self, folder: str | Path) -> None:
        """Write tokenizers, scheduler and model_index.json, all that `save` writes but the networks."""
        folder = Path(folder).expanduser()
        for name, tokenizer in (("tokenizer", self.tokenizer), ("tokenizer_2", self.tokenizer_2)):
            if tokenizer is not None:
                _remove_stale(folder / name, set(tokenizer.save(folder / name)))
        write_json(folder / "scheduler" / "scheduler_config.json", self.scheduler)
        write_json(folder / "model_index.json", self._model_index())

    def save_single_file(self, path: str | Path, *, dtype: Any = None) -> None:
        """Write one .safetensors file in the layout of the original code.

        The layout has no room for a configuration, and of the scheduler it keeps the prediction type alone.

        Raises:
            ValueError: if `path` has another suffix, `dtype` is not floating-point, or the networks are not
                those that a reader of the layout would take them for.
            OSError: if the disk is full or the folder not writable.
        """
        _check_dtype(dtype)
        path = Path(path).expanduser()
        if path.suffix != ".safetensors":
            raise ValueError(f"{path}: a single file is written as .safetensors")
        stated = {"epsilon": "epsilon", "v_prediction": "v"}.get(self.scheduler.get("prediction_type", "epsilon"))
        if stated is None:
            raise ValueError(f"{path}: the layout cannot say prediction_type={self.scheduler['prediction_type']!r}")
        configs = {name: part.network.config for name, part in self.networks()}
        tensors = original.join({name: export_tensors(part, dtype) for name, part in self.networks()}, configs, path)
        write_safetensors(path, tensors.items(), {"format": "pt", "modelspec.prediction_type": stated})

    def networks(self) -> Iterator[tuple[str, Part]]:
        """(name, part) of every network there is."""
        for name in PARTS:
            part = getattr(self, name)
            if part is not None:
                yield name, part

    def _size(self) -> tuple[int, int]:
        """Height and width that the UNet was trained at, in pixels; 512 where its configuration does not say."""
        down, latents = self.vae.network.config.downscale, self.unet.network.config.sample_size
        if latents is None:
            return 512, 512
        height, width = (latents, latents) if isinstance(latents, int) else latents
        return height * down, width * down

    def _model_index(self) -> dict[str, Any]:
        xl, inpaint = self.text_encoder_2 is not None, self.unet.network.config.in_channels == 9
        kind = self.index.get("_class_name", "").removeprefix("Flax")
        if kind not in PIPELINE_CLASSES:
            kind = f"StableDiffusion{'XL' if xl else ''}{'Inpaint' if inpaint else ''}Pipeline"
        index: dict[str, Any] = {"_class_name": kind, "_diffusers_version": DIFFUSERS_VERSION}
        index["unet"] = ["diffusers", "UNet2DConditionModel"]
        index["vae"] = ["diffusers", "AutoencoderKL"]
        index["scheduler"] = ["diffusers", self.scheduler.get("_class_name", "DDIMScheduler")]
        for suffix, encoder in (("", self.text_encoder), ("_2", self.text_encoder_2)):
            if encoder is not None:
                index[f"text_encoder{suffix}"] = ["transformers", encoder.network.config.architectures[0]]
                index[f"tokenizer{suffix}"] = ["transformers", "CLIPTokenizer"]
        # Parts that diffusers expects and we don't have: no safety checker, no image prompts.
        index |= {"feature_extractor": [None, None], "image_encoder": [None, None]}
        if xl:
            index["force_zeros_for_empty_prompt"] = self.index.get("force_zeros_for_empty_prompt", True)
        else:
            index |= {"safety_checker": [None, None], "requires_safety_checker": False}
        return index


def _texts(name: str, given: str | Sequence[str]) -> list[str]:
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{name}={given!r} is no text, or a list of texts")
    if not texts:
        raise ValueError(f"{name}={given!r} has no text")
    return list(texts)


def _seeds(given: int | Sequence[int], count: int) -> list[int]:
    seeds = np.asarray(given)
    if seeds.ndim > 1 or seeds.dtype.kind not in "iu":
        raise ValueError(f"seed={given!r} is no whole number, or a list of them")
    return seeds.tolist() if seeds.ndim else [int(seeds) + i for i in range(count)]


def _array(name: str, given: ArrayLike) -> np.ndarray:
    """What `generate` is given to begin with, as a request has it."""
    array = np.asarray(given)
    if name == "image":
        if array.dtype != np.uint8:
            raise ValueError(f"image has dtype {array.dtype}; allowed: uint8, 0 to 255")
        return array
    array = array.astype(np.float32)
    if not np.isfinite(array).all() or (name == "mask" and not 0 <= array.min() <= array.max() <= 1):
        raise ValueError(f"{name} has values that are {'not finite' if name == 'latents' else 'outside 0 to 1'}")
    return array


def check_fit(networks: Mapping[str, Network], tokenizers: Mapping[str, CLIPTokenizer]) -> None:
    """Raise ValueError where two parts of a pipeline are not made for each other."""
    configs: dict[str, Any] = {part: network.config for part, network in networks.items()}
    unet, vae = configs["unet"], configs["vae"]
    widths = [configs[part].hidden_size for part in ("text_encoder", "text_encoder_2") if part in configs]
    if sum(widths) != unet.cross_attention_dim:
        shown = " + ".join(map(str, widths))
        raise ValueError(f"the unet's cross_attention_dim={unet.cross_attention_dim} is not the text encoders' width {shown}")
    if unet.out_channels not in (vae.latent_channels, 2 * vae.latent_channels):
        raise ValueError(
            f"the unet's out_channels={unet.out_channels} don't fit the vae's latent_channels={vae.latent_channels}"
        )
    for name, tokenizer in tokenizers.items():
        part = name.replace("tokenizer", "text_encoder")
        # No device complains of an id without a row.
        if (ids := max(tokenizer.vocab.values()) + 1) > configs[part].vocab_size:
            raise ValueError(f"the {name} has ids up to {ids - 1}, but the {part} a vocab_size={configs[part].vocab_size}")
        if tokenizer.max_length > (positions := configs[part].max_position_embeddings):
            raise ValueError(
                f"the {name} makes {tokenizer.max_length} tokens, but the {part} has max_position_embeddings={positions}"
            )


def save_part(folder: str | Path, name: str, part: Part, *, dtype: Any = None) -> None:
    """Write one network into its place in a diffusers folder: its weights, then its configuration.

    Raises:
        ValueError, OSError: as `Pipeline.save`.
    """
    _check_dtype(dtype)
    folder = Path(folder).expanduser() / name
    file = f"{WEIGHTS[name]}.safetensors"
    write_safetensors(folder / file, export_tensors(part, dtype).items(), {"format": "pt"})
    save_config(folder.parent, name, part.network)
    _remove_stale(folder, {file, "config.json"})


def save_config(folder: str | Path, name: str, network: Network) -> None:
    """Write a network's configuration alone."""
    write_json(Path(folder).expanduser() / name / "config.json", network.config.to_dict())


def _check_dtype(dtype: Any) -> None:
    if dtype is not None and np.dtype(dtype) not in FLOATS:
        raise ValueError(f"dtype={np.dtype(dtype).name} is not supported (allowed: {', '.join(d.name for d in FLOATS)})")


def export_tensors(part: Part, dtype: Any = None) -> Tensors:
    """The part's parameters under their PyTorch keys; each is fetched from its devices when it is read."""
    return dict(_export(path, leaf, np.dtype(dtype or leaf.dtype)) for path, leaf in flatten(part.params))


def _export(path: tuple, leaf: jax.Array, dtype: np.dtype) -> tuple[str, Tensor]:
    if path[-1] == "kernel":
        return torch_key(path), Tensor(
            to_torch_shape(leaf.shape), dtype, lambda: to_torch(np.asarray(leaf)).astype(dtype, copy=False)
        )
    return torch_key(path), Tensor(leaf.shape, dtype, lambda: np.asarray(leaf).astype(dtype, copy=False))


def _remove_stale(folder: Path, written: set[str]) -> None:
    """Remove other weights (variants, shards, pickles) and tokenizers of a part: they are an older model's."""
    for file in sorted(folder.iterdir()):
        known = file.suffix in SUFFIXES or ".index." in file.name or file.name in ("tokenizer.json", "added_tokens.json")
        if known and file.name not in written and not file.name.startswith("."):
            logger.info("removing %s, which belongs to an older model", file)
            file.unlink()
