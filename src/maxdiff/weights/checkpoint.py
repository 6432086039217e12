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
from maxdiff.weights import open_clip, original
from maxdiff.weights.names import normalise
from maxdiff.weights.source import FromPt, Source, open_source, open_weights
from maxdiff.weights.tensors import SUFFIXES, Tensors, open_tensors, read_metadata
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
# What diffusers notes in a part's config.json; transformers notes nothing.
CLASS_NAMES = {"unet": "UNet2DConditionModel", "vae": "AutoencoderKL", "text_encoder": "", "text_encoder_2": ""}
PREDICTION_TYPES = ("epsilon", "v_prediction", "sample")


def make_network(part: str, config: PartConfig, compute: Compute | None = None) -> Network:
    """The network of a part."""
    return Network(PARTS[part][0], config, compute)


class Checkpoint(Protocol):
    """What `open_checkpoint` returns."""

    @property
    def bare(self) -> bool:
        """Whether it is a file of a part's weights alone, without configuration."""
        ...

    def has(self, part: str) -> bool:
        """Whether there is such a part (`unet`, ..., `tokenizer_2`, `scheduler`)."""
        ...

    def config(self, part: str) -> PartConfig | None:
        """The part's configuration; None where a bare file does not tell its architecture."""
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

    @property
    def bare(self) -> bool:
        return False

    def has(self, part: str) -> bool:
        if index := self.index():  # then it says what there is, whatever else lies in the folder
            return (index.get(part) or [None])[0] is not None
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
        if written_as not in ("", CLASS_NAMES[part]):
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
    """One file: a whole checkpoint in the original layout, or the weights of a part or two alone."""

    path: Path
    stated_prediction: str | None = None

    @cached_property
    def _tensors(self) -> Tensors:
        tensors = open_tensors(self.path)
        if lora := [key for key in tensors if "lora" in key.lower()]:
            raise ValueError(f"{self.path} holds a LoRA (such as {lora[0]}), which is not supported")
        if original.family(tensors) and (strays := original.unused(tensors)):
            raise ValueError(f"{self.path}: {len(strays)} keys belong to no part: {', '.join(strays[:8])}")
        return tensors

    @cached_property
    def _family(self) -> str | None:
        return original.family(self._tensors)

    @property
    def bare(self) -> bool:
        return self._family is None

    def _prefix(self, part: str) -> str | None:
        """Where the part lies in a whole checkpoint; None if this family has no such part."""
        family = self._family or ""
        second = original.OPEN_CLIP.get(family) if family == "sdxl" else None
        first = original.CLIP_L.get(family) or original.OPEN_CLIP.get(family)
        return {"unet": original.UNET, "vae": original.VAE, "text_encoder": first, "text_encoder_2": second}[part]

    def _part(self, part: str) -> Tensors:
        """The part's tensors, without their prefix; a bare file may have none."""
        prefix = self._prefix(part)
        found = original.part(self._tensors, prefix) if prefix else {}
        if not found and self.bare:
            found = original.part(self._tensors, "")
        if not found:
            raise ValueError(f"{self.path} has no {part}: no key begins with {prefix}")
        if part.startswith("text_encoder") and not open_clip.is_open_clip(found):
            found = normalise(found, flax=self.path.suffix == ".msgpack", text_encoder=True)
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
        if self.bare:
            return part in PARTS
        if part in TOKENIZERS:
            return self.has(part.replace("tokenizer", "text_encoder"))
        return part == "scheduler" or self._prefix(part) is not None

    def config(self, part: str) -> PartConfig | None:
        tensors = self._part(part)
        try:
            if part == "unet" and original.is_unet(tensors):
                return original.unet_config(tensors, self._sample_size)
            if part == "vae" and original.is_vae(tensors):
                return original.vae_config(tensors, sdxl=self._family == "sdxl", sample_size=8 * self._sample_size)
            if part.startswith("text_encoder") and open_clip.is_open_clip(tensors):
                return open_clip.open_clip_config(tensors, projection=part == "text_encoder_2")
            return open_clip.clip_config(tensors) if part == "text_encoder" else None
        except KeyError as key:
            raise ValueError(f"{self.path}: the {part} has no key {key}, from which its architecture is read") from None

    def tensors(self, part: str) -> tuple[Tensors, str]:
        tensors, config = self._part(part), self.config(part)
        if isinstance(config, UNetConfig):
            tensors = original.to_diffusers(tensors, original.unet_names(config))
        elif isinstance(config, VAEConfig):
            tensors = original.to_diffusers(tensors, original.vae_names(config))
        elif isinstance(config, CLIPTextConfig) and open_clip.is_open_clip(tensors):
            tensors = open_clip.open_clip_to_transformers(tensors, config)
        flax = self.path.suffix == ".msgpack" and not part.startswith("text_encoder")
        return normalise(tensors, flax=flax, text_encoder=False), str(self.path)

    def tokenizer(self, part: str) -> CLIPTokenizer:
        # SD 2.x and SDXL's second tokenizer pad with `!`, as OpenCLIP's token 0 is.
        prefix = self._prefix(part.replace("tokenizer", "text_encoder"))
        return published_tokenizer("!" if prefix in original.OPEN_CLIP.values() else END)

    def scheduler(self) -> dict[str, Any]:
        return original.scheduler_config(self._family or "", self._prediction, zero_snr="ztsnr" in self._tensors)

    def index(self) -> dict[str, Any]:
        return {}


def open_checkpoint(
    name: str | Path, *, revision: str | None = None, variant: str | None = None,
    from_pt: FromPt = "auto", prediction_type: str | None = None,
) -> Checkpoint:  # fmt: skip
    """Open a local folder, a single file or a hub repository, as `name` turns out to be.

    Args:
        name: a local folder or file if there is one, else a repository on the hub or, as owner/repository/file, one of
            its files.
        revision: of a hub repository.
        variant, from_pt: of a folder or repository, as in `open_weights`.
        prediction_type: over what a single file says.

    Raises:
        FileNotFoundError: if there is none.
        ValueError: if it is damaged, is not a model, or has not what the options ask for.
    """
    if prediction_type not in (None, *PREDICTION_TYPES):
        raise ValueError(f"prediction_type={prediction_type!r} is not supported (allowed: {', '.join(PREDICTION_TYPES)})")
    if from_pt not in ("auto", True, False):
        raise ValueError(f"from_pt={from_pt!r} is not supported (allowed: 'auto', True, False)")
    path = Path(name).expanduser()
    if not path.is_file() and path.suffix in SUFFIXES and len(path.parts) > 2 and path.parts[0] not in ("/", ".", ".."):
        path = _hub_file(path, revision)
    if not path.is_file():
        return Folder(open_source(name, revision), from_pt, variant)
    if path.suffix not in SUFFIXES:
        raise ValueError(f"{path}: a single file ends in one of {', '.join(SUFFIXES)}")
    if variant:
        raise ValueError(f"variant={variant}: {path} is a single file, which has no variants")
    if from_pt != "auto" and from_pt != (path.suffix != ".msgpack"):
        raise ValueError(f"from_pt={from_pt}: {path} holds {'Flax' if from_pt else 'PyTorch'} weights")
    return SingleFile(path, prediction_type)


def _hub_file(path: Path, revision: str | None) -> Path:
    """owner/repository/file of the hub, fetched."""
    try:
        return open_source("/".join(path.parts[:2]), revision).local("/".join(path.parts[2:]))
    except FileNotFoundError as error:
        raise FileNotFoundError(f"there is no file {path}; as a file on the hub: {error}") from None
