"""A checkpoint as its parts, whichever layout it is stored in.

A `Checkpoint` answers for each part (`unet`, `vae`, `text_encoder`, `text_encoder_2`): which network
it is, and its tensors under the published PyTorch keys; and for the tokenizers and the scheduler.
"""

import dataclasses
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from maxdiff.models.clip import CLIPTextConfig, CLIPTextModel
from maxdiff.models.layers import Compute
from maxdiff.models.network import Network
from maxdiff.models.unet import UNet2DConditionModel, UNetConfig
from maxdiff.models.vae import AutoencoderKL, VAEConfig
from maxdiff.weights import original
from maxdiff.weights.names import normalise
from maxdiff.weights.source import FromPt, Source, open_source, open_weights
from maxdiff.weights.tensors import TORCH_SUFFIXES, Tensors, open_tensors, read_metadata
from maxdiff.weights.tokenizer import END, CLIPTokenizer, published_tokenizer, read_tokenizer

PartConfig = UNetConfig | VAEConfig | CLIPTextConfig
# part -> its network, and how its configuration is read from a dict.
PARTS: dict[str, tuple[type, Callable[[Mapping[str, Any], str], PartConfig]]] = {
    "unet": (UNet2DConditionModel, UNetConfig.from_dict),
    "vae": (AutoencoderKL, VAEConfig.from_dict),
    "text_encoder": (CLIPTextModel, CLIPTextConfig.from_dict),
    "text_encoder_2": (CLIPTextModel, CLIPTextConfig.from_dict),
}
TOKENIZERS = ("tokenizer", "tokenizer_2")
# What diffusers notes in a part's config.json.
CLASS_NAMES = {"unet": "UNet2DConditionModel", "vae": "AutoencoderKL"}
PREDICTION_TYPES = ("epsilon", "v_prediction", "sample")


def make_network(part: str, config: PartConfig, compute: Compute | None = None) -> Network:
    """The network of a part."""
    return Network(PARTS[part][0], config, compute)


class Checkpoint(Protocol):
    """What `open_checkpoint` returns. `config` is None where the file holds none and it cannot be inferred."""

    def has(self, part: str) -> bool:
        """Whether there is such a part (`unet`, ..., `tokenizer_2`, `scheduler`)."""
        ...

    def config(self, part: str) -> PartConfig | None:
        """The part's configuration."""
        ...

    def tensors(self, part: str) -> tuple[Tensors, str]:
        """The part's tensors by their PyTorch keys, and the file's name for messages."""
        ...

    def tokenizer(self, part: str) -> CLIPTokenizer:
        """One of TOKENIZERS."""
        ...

    def scheduler(self) -> dict[str, Any]:
        """diffusers' scheduler_config.json."""
        ...

    def index(self) -> dict[str, Any]:
        """diffusers' model_index.json, or {}."""
        ...


@dataclasses.dataclass(frozen=True)
class Folder:
    """A diffusers folder, local or on the hub; or the folder of one part alone."""

    source: Source
    from_pt: FromPt = "auto"
    variant: str | None = None

    def _folder(self, part: str, file: str) -> str | None:
        """The subfolder that has the part's `file`: its own, or the top if that is the part itself."""
        if self.source.has(f"{part}/{file}"):
            return f"{part}/"
        return "" if self.source.has(file) and not self.source.has("model_index.json") else None

    def has(self, part: str) -> bool:
        files = {"scheduler": ("scheduler_config.json",)}
        files |= dict.fromkeys(TOKENIZERS, ("vocab.json", "tokenizer.json"))
        return any(self._folder(part, file) is not None for file in files.get(part, ("config.json",)))

    def config(self, part: str) -> PartConfig:
        folder = self._folder(part, "config.json")
        if folder is None:
            raise FileNotFoundError(f"{self.source.name} has no file {part}/config.json")
        file = f"{folder}config.json"
        values = self.source.json(file)
        written_as = values.get("_class_name", "").removeprefix("Flax")
        if part in CLASS_NAMES and written_as not in ("", CLASS_NAMES[part]):
            raise ValueError(f"{self.source.name}/{file}: _class_name={written_as!r} is no {part} that we know "
                             f"(allowed: {CLASS_NAMES[part]!r})")  # fmt: skip
        if part.startswith("text_encoder") and not values.get("architectures") and part in self.index():
            values["architectures"] = [self.index()[part][1]]  # whether there is a projection
        return PARTS[part][1](values, f"{self.source.name}/{file}")

    def tensors(self, part: str) -> tuple[Tensors, str]:
        folder = (self._folder(part, "config.json") or "").rstrip("/")
        tensors, flax, where = open_weights(self.source, folder, from_pt=self.from_pt, variant=self.variant)
        return normalise(tensors, flax=flax, text_encoder=part.startswith("text_encoder")), where

    def tokenizer(self, part: str) -> CLIPTokenizer:
        folder = self._folder(part, "vocab.json")
        folder = self._folder(part, "tokenizer.json") if folder is None else folder
        if folder is None:
            raise FileNotFoundError(f"{self.source.name} has neither {part}/vocab.json nor {part}/tokenizer.json")
        return read_tokenizer(self.source, folder.rstrip("/"))

    def scheduler(self) -> dict[str, Any]:
        folder = self._folder("scheduler", "scheduler_config.json")
        config = self.source.json(f"{'scheduler/' if folder is None else folder}scheduler_config.json")
        if "_class_name" in config:
            config["_class_name"] = config["_class_name"].removeprefix("Flax")
        return config

    def index(self) -> dict[str, Any]:
        return self.source.json("model_index.json") if self.source.has("model_index.json") else {}


@dataclasses.dataclass(frozen=True)
class SingleFile:
    """One file: a whole checkpoint in the original layout, or the weights of one part alone."""

    path: Path
    stated_prediction: str | None = None

    @cached_property
    def _tensors(self) -> Tensors:
        tensors = open_tensors(self.path)
        if original.family(tensors) and (strays := original.unused(tensors)):
            raise ValueError(f"{self.path}: {len(strays)} keys belong to no part: {', '.join(strays[:8])}")
        return tensors

    @cached_property
    def _family(self) -> str | None:
        return original.family(self._tensors)

    def _prefix(self, part: str) -> str | None:
        """Where the part lies in a whole checkpoint; None if this family has no such part."""
        family = self._family or ""
        second = original.OPEN_CLIP.get(family) if family == "sdxl" else None
        first = original.CLIP_L.get(family) or original.OPEN_CLIP.get(family)
        return {"unet": original.UNET, "vae": original.VAE, "text_encoder": first, "text_encoder_2": second}[part]

    def _part(self, part: str) -> Tensors:
        if self._family is None:
            return self._tensors
        prefix = self._prefix(part)
        found = original.part(self._tensors, prefix) if prefix else {}
        if not found:
            raise ValueError(f"{self.path} has no {part}: no key begins with {prefix}")
        return found

    @cached_property
    def _prediction(self) -> str:
        if self.stated_prediction:
            return self.stated_prediction
        return original.prediction_type(self._family or "", self._tensors, read_metadata(self.path), self.path)

    @property
    def _sample_size(self) -> int:
        """Latents' height: 1024 px for SDXL, 768 for SD 2.1 (v-prediction), else 512."""
        if self._family == "sdxl":
            return 128
        return 96 if self._family == "sd2" and self._prediction == "v_prediction" else 64

    def has(self, part: str) -> bool:
        if self._family is None:
            return part in PARTS
        if part in TOKENIZERS:
            return self.has(part.replace("tokenizer", "text_encoder"))
        return part == "scheduler" or self._prefix(part) is not None

    def config(self, part: str) -> PartConfig | None:
        tensors = self._part(part)
        try:
            if self._family is None:
                return self._bare_config(part, tensors)
            if part == "unet":
                return original.unet_config(tensors, self._sample_size)
            if part == "vae":
                return original.vae_config(tensors, sdxl=self._family == "sdxl", sample_size=8 * self._sample_size)
            if self._is_open_clip(part):
                return original.open_clip_config(tensors, projection=self._family == "sdxl")
            return original.clip_config(tensors)
        except KeyError as key:
            raise ValueError(f"{self.path}: the {part} has no key {key}, from which its architecture is read") from None

    def _bare_config(self, part: str, tensors: Tensors) -> PartConfig | None:
        """Only an autoencoder in the original layout tells its architecture."""
        if part == "vae" and "encoder.down.0.block.0.conv1.weight" in tensors:
            return original.vae_config(tensors, sdxl=False, sample_size=512)
        return None

    def _is_open_clip(self, part: str) -> bool:
        return self._prefix(part) in original.OPEN_CLIP.values()

    def tensors(self, part: str) -> tuple[Tensors, str]:
        tensors, config = self._part(part), self.config(part)
        if part == "unet" and config is not None:
            tensors = original.to_diffusers(tensors, original.unet_names(config))  # pyright: ignore[reportArgumentType]
        elif part == "vae" and config is not None:
            tensors = original.to_diffusers(tensors, original.vae_names(config))  # pyright: ignore[reportArgumentType]
        elif config is not None and self._is_open_clip(part):
            tensors = original.open_clip_to_transformers(tensors, config)  # pyright: ignore[reportArgumentType]
        flax = self.path.suffix == ".msgpack"
        return normalise(tensors, flax=flax, text_encoder=part.startswith("text_encoder")), str(self.path)

    def tokenizer(self, part: str) -> CLIPTokenizer:
        # SD 2.x and SDXL's second tokenizer pad with `!`, as OpenCLIP's token 0 is.
        return published_tokenizer("!" if self._is_open_clip(part.replace("tokenizer", "text_encoder")) else END)

    def scheduler(self) -> dict[str, Any]:
        return original.scheduler_config(self._family or "", self._prediction)

    def index(self) -> dict[str, Any]:
        return {}


def open_checkpoint(
    name: str | Path, *, revision: str | None = None, variant: str | None = None,
    from_pt: FromPt = "auto", prediction_type: str | None = None,
) -> Checkpoint:  # fmt: skip
    """Open a local folder, a single file or a hub repository, as `name` turns out to be.

    Raises:
        FileNotFoundError: if there is none.
        ValueError: if it is damaged, or is not a model.
    """
    if prediction_type not in (None, *PREDICTION_TYPES):
        raise ValueError(f"prediction_type={prediction_type!r} is not supported (allowed: {', '.join(PREDICTION_TYPES)})")
    path = Path(name).expanduser()
    if path.is_file():
        if path.suffix not in (".safetensors", ".msgpack", *TORCH_SUFFIXES):
            raise ValueError(f"{path}: a single file must be .safetensors, .msgpack or {', '.join(TORCH_SUFFIXES)}")
        return SingleFile(path, prediction_type)
    return Folder(open_source(name, revision), from_pt, variant)
