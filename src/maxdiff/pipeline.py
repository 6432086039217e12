"""A Stable Diffusion pipeline: its networks with their weights, tokenizers and noise schedule."""

import dataclasses
import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxdiff.models.layers import Compute
from maxdiff.models.network import Network, Params, flatten
from maxdiff.weights import original
from maxdiff.weights.checkpoint import PARTS, TOKENIZERS, Checkpoint, make_network, open_checkpoint
from maxdiff.weights.load import Placement, load_params
from maxdiff.weights.names import to_torch, to_torch_shape, torch_key
from maxdiff.weights.source import FromPt
from maxdiff.weights.tensors import Tensor, Tensors, write_atomically, write_safetensors
from maxdiff.weights.tokenizer import CLIPTokenizer

logger = logging.getLogger(__name__)

# File names in a diffusers folder, and which library loads the part.
WEIGHTS = {"unet": "diffusion_pytorch_model", "vae": "diffusion_pytorch_model",
           "text_encoder": "model", "text_encoder_2": "model"}  # fmt: skip
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
        prediction_type: str | None = None,
        dtype: Any = jnp.float32,
        compute: Compute | None = None,
        placement: Placement | None = None,
    ) -> "Pipeline":
        """Load a pipeline from a diffusers folder, a hub repository or a single file.

        Args:
            name: a local folder or file if there is one, else a repository on the hub.
            revision: the hub's branch, tag or commit.
            variant: the infix of a second set of weights, such as fp16.
            from_pt: True for PyTorch weights, False for Flax weights, "auto" for what is there.
            sources: parts from elsewhere, part -> folder, repository or file: {"vae": "stabilityai/sd-vae-ft-mse"}.
                A source may be a whole pipeline or the part alone.
            prediction_type: `epsilon`, `v_prediction` or `sample`, over what the checkpoint says.
            dtype: of the parameters.
            compute: how the networks compute (dtype of activations, attention kernel, ...).
            placement: (path, spec) -> sharding of each parameter; by default the first device.

        Raises:
            FileNotFoundError: if a source or a file in it is missing.
            ValueError: if a file is damaged, a configuration unsupported, or weights don't fit it.
        """
        options: dict[str, Any] = {"variant": variant, "from_pt": from_pt, "prediction_type": prediction_type}
        main = open_checkpoint(name, revision=revision, **options)
        sources = dict(sources or {})
        allowed = (*PARTS, *TOKENIZERS, "scheduler")
        for part in sources:
            if part not in allowed:
                raise ValueError(f"sources: {part!r} is no part of a pipeline (allowed: {', '.join(allowed)})")
        opened = {part: open_checkpoint(source, **options) for part, source in sources.items()}

        def origin(part: str) -> Checkpoint:
            return opened.get(part, main)

        second = origin("text_encoder_2").has("text_encoder_2") if "text_encoder_2" in opened else main.has("text_encoder_2")
        networks = [part for part in PARTS if part != "text_encoder_2" or second]
        # Everything small first: a mistake is reported before gigabytes are read.
        built = {part: _network(part, origin(part), main, sources.get(part, name), compute) for part in networks}
        tokenizers: dict[str, Any] = {part: origin(part).tokenizer(part) for part in TOKENIZERS[: 2 if second else 1]}
        scheduler = origin("scheduler").scheduler()
        if prediction_type:
            scheduler["prediction_type"] = prediction_type
        tensors = {part: origin(part).tensors(part) for part in networks}
        parts: dict[str, Any] = {}
        for part in networks:
            params = load_params(built[part], *tensors[part], dtype=dtype, placement=placement)
            parts[part] = Part(built[part], params)
        return cls(scheduler=scheduler, index=main.index(), **parts, **tokenizers)

    def save(self, folder: str | Path, *, dtype: Any = None) -> None:
        """Write a diffusers folder that `from_pretrained` loads; `dtype` converts the weights.

        Each file appears whole or not at all, the weights first and model_index.json last.

        Raises:
            OSError: if the disk is full or the folder not writable.
        """
        folder = Path(folder).expanduser()
        for name, part in self.networks():
            file = folder / name / f"{WEIGHTS[name]}.safetensors"
            write_safetensors(file, export_tensors(part, dtype).items(), {"format": "pt"})
            _write_json(folder / name / "config.json", part.network.config.to_dict())
            _remove_stale(file)
        for name, tokenizer in (("tokenizer", self.tokenizer), ("tokenizer_2", self.tokenizer_2)):
            if tokenizer is not None:
                tokenizer.save(folder / name)
        _write_json(folder / "scheduler" / "scheduler_config.json", self.scheduler)
        _write_json(folder / "model_index.json", self._model_index())

    def save_single_file(self, path: str | Path, *, dtype: Any = None) -> None:
        """Write one .safetensors file in the layout of the original code.

        Raises:
            ValueError: if `path` has another suffix.
            OSError: if the disk is full or the folder not writable.
        """
        path = Path(path).expanduser()
        if path.suffix != ".safetensors":
            raise ValueError(f"{path}: a single file is written as .safetensors")
        parts = {name: export_tensors(part, dtype) for name, part in self.networks()}
        unet, vae = self.unet.network.config, self.vae.network.config
        tensors = _prefixed(original.UNET, original.from_diffusers(parts["unet"], original.unet_names(unet), vae=False))
        tensors |= _prefixed(original.VAE, original.from_diffusers(parts["vae"], original.vae_names(vae), vae=True))
        if self.text_encoder_2 is not None:
            tensors |= _prefixed(original.CLIP_L["sdxl"], parts["text_encoder"])
            tensors |= _prefixed(original.OPEN_CLIP["sdxl"], original.transformers_to_open_clip(parts["text_encoder_2"]))
        elif unet.use_linear_projection:
            tensors |= _prefixed(original.OPEN_CLIP["sd2"], original.transformers_to_open_clip(parts["text_encoder"]))
        else:
            tensors |= _prefixed(original.CLIP_L["sd1"], parts["text_encoder"])
        stated = {"epsilon": "epsilon", "v_prediction": "v"}.get(self.scheduler.get("prediction_type", "epsilon"))
        metadata = {"format": "pt"} | ({"modelspec.prediction_type": stated} if stated else {})
        write_safetensors(path, tensors.items(), metadata)

    def networks(self) -> Iterator[tuple[str, Part]]:
        """(name, part) of every network there is."""
        for name in PARTS:
            part = getattr(self, name)
            if part is not None:
                yield name, part

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


def _network(part: str, checkpoint: Checkpoint, main: Checkpoint, name: Any, compute: Compute | None) -> Network:
    """The part's network; a bare file of weights has the configuration that the main checkpoint gives the part."""
    config = checkpoint.config(part) or main.config(part)
    if config is None:
        raise ValueError(f"{name} holds the weights of one part alone; name it in sources={{{part!r}: ...}} of a pipeline")
    return make_network(part, config, compute)


def export_tensors(part: Part, dtype: Any = None) -> Tensors:
    """The part's parameters under their PyTorch keys; each is fetched from its devices when it is read."""
    return dict(_export(path, leaf, np.dtype(dtype or leaf.dtype)) for path, leaf in flatten(part.params))


def _export(path: tuple, leaf: jax.Array, dtype: np.dtype) -> tuple[str, Tensor]:
    if path[-1] == "kernel":
        return torch_key(path), Tensor(
            to_torch_shape(leaf.shape), dtype, lambda: to_torch(np.asarray(leaf)).astype(dtype, copy=False)
        )
    return torch_key(path), Tensor(leaf.shape, dtype, lambda: np.asarray(leaf).astype(dtype, copy=False))


def _prefixed(prefix: str, tensors: Tensors) -> Tensors:
    return {prefix + key: tensor for key, tensor in tensors.items()}


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    write_atomically(path, [json.dumps(value, indent=2).encode() + b"\n"])


def _remove_stale(written: Path) -> None:
    """Remove an index and its shards from an earlier save, which a loader might prefer to `written`."""
    stem = written.name.removesuffix(".safetensors")
    for pattern in (f"{stem}.safetensors.index.json", f"{stem}-?????-of-?????.safetensors"):
        for file in written.parent.glob(pattern):
            logger.info("removing %s, which %s replaces", file, written.name)
            file.unlink()
