"""InceptionV3 beside pytorch-fid's, by figures that make_inception_features.py has taken from it."""

import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import torch

from maxdiff.features import clean_fid_pixels, inception, pytorch_fid_pixels
from maxdiff.models.inception import InceptionV3
from maxdiff.models.network import Network, flatten
from maxdiff.weights.features import load_inception
from maxdiff.weights.tensors import Tensor, write_safetensors
from tests.models import make_inception_features as made

THEIRS = dict(np.load(made.FILE))
SIZES = {"small": made.SMALL, "large": made.LARGE}


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("inception") / "inception.safetensors"
    tensors = {k: Tensor(v.shape, v.dtype, lambda v=v: v) for k, v in made.random_inception().items()}
    write_safetensors(path, tensors.items(), {})
    return path


def relative(ours: np.ndarray, theirs: np.ndarray) -> float:
    return float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))


def test_features_equal_pytorch_fids(weights: Path):
    network = inception(weights)
    assert (network.name, network.dim, network.is_inception) == ("inception", 2048, True)
    for name, size in SIZES.items():
        ours, theirs = network.extract(made.random_images(*size)), THEIRS[f"features_{name}"]
        assert ours.shape == theirs.shape
        assert ours.dtype == np.float32
        assert relative(ours, theirs) < 1e-5
        np.testing.assert_allclose(ours, theirs, atol=1e-3)  # of up to 33


@pytest.mark.parametrize("name", SIZES)
def test_pixels_equal_pytorch_fids_and_clean_fids(name: str):
    images = made.random_images(*SIZES[name])
    every = slice(None, None, made.EVERY)
    # float32's rounding of positions between pixels, of which the images here are noise.
    np.testing.assert_allclose(pytorch_fid_pixels(images)[:, every, every], THEIRS[f"pytorch_fid_{name}"], atol=2e-6)
    np.testing.assert_array_equal(clean_fid_pixels(images)[:, every, every], THEIRS[f"clean_fid_{name}"])
    as_float = images.astype(np.float32) / np.float32(255)
    np.testing.assert_allclose(pytorch_fid_pixels(as_float), pytorch_fid_pixels(images), atol=1e-6)
    np.testing.assert_allclose(clean_fid_pixels(as_float), clean_fid_pixels(images), atol=1e-6)


def test_clean_fids_preprocessing_is_chosen_by_name(weights: Path, monkeypatch: pytest.MonkeyPatch):
    seen = []
    monkeypatch.setattr(
        InceptionV3, "__call__", lambda self, pixels: (jax.debug.callback(seen.append, pixels), pixels[:, 0, 0])[1]
    )
    images = made.random_images(*made.SMALL)
    for name, pixels in (("clean-fid", clean_fid_pixels), ("pytorch-fid", pytorch_fid_pixels)):
        inception(weights, name).extract(images)  # pyright: ignore[reportArgumentType]
        jax.effects_barrier()
        np.testing.assert_allclose(seen.pop(), pixels(images), atol=1e-6)
    with pytest.raises(ValueError, match="preprocessing='clean' is not supported \\(allowed: pytorch-fid, clean-fid\\)"):
        inception(weights, "clean")  # pyright: ignore[reportArgumentType]


def test_the_pickle_and_safetensors_are_one(weights: Path, tmp_path: Path):
    path = tmp_path / "pt_inception-2015-12-05-6726825d.pth"
    state = {key: torch.from_numpy(value) for key, value in made.random_inception().items()}
    torch.save({**state, "Conv2d_1a_3x3.bn.num_batches_tracked": torch.tensor(0)}, path)
    for (place, ours), (_, other) in zip(*(flatten(load_inception(p).params) for p in (path, weights)), strict=True):
        np.testing.assert_array_equal(ours, other, err_msg=str(place))


def test_parameters_are_those_of_pytorch_fid():
    # torchvision's count of inception_v3(aux_logits=False), less the classifier, and its batch norms' statistics.
    network = Network(InceptionV3, None)
    assert network.num_parameters() == 21_785_568 + 2 * 17_216
    assert len(network.specs) == 94 * 5


def test_other_files_are_errors_that_name_the_keys(weights: Path, tmp_path: Path):
    def written(change: dict[str, np.ndarray | None]) -> Path:
        changed = {k: v for k, v in {**made.random_inception(), **change}.items() if v is not None}
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.safetensors"
        write_safetensors(path, ((k, Tensor(v.shape, v.dtype, lambda v=v: v)) for k, v in changed.items()), {})
        return path

    other = np.zeros((2, 2), np.float32)
    with pytest.raises(
        ValueError, match=r"0.safetensors: 1 keys are missing: Mixed_7c.branch_pool.bn.running_var; 1 keys have no"
    ):
        load_inception(written({"Mixed_7c.branch_pool.bn.running_var": None, "AuxLogits.fc.weight": other}))
    with pytest.raises(ValueError, match=r"1.safetensors: 1 tensors do not fit: Conv2d_1a_3x3.conv.weight has shape \(2, 2\)"):
        load_inception(written({"Conv2d_1a_3x3.conv.weight": other}))
    with pytest.raises(FileNotFoundError, match=r"nowhere.pth; InceptionV3's weights are published at https"):
        load_inception(tmp_path / "nowhere.pth")
    network = Network(InceptionV3, None)
    with pytest.raises(ValueError, match=r"pixels has shape \[1, 64, 64, 3\], but this network takes \[batch 299 299 3\]"):
        jax.eval_shape(network.apply, network.abstract(), jax.ShapeDtypeStruct((1, 64, 64, 3), np.float32))


def test_images_of_another_kind_are_an_error(weights: Path):
    extract = inception(weights).extract
    for images in (np.zeros((2, 8, 8, 3), np.float32), np.zeros((8, 8, 3), np.uint8), np.zeros((2, 3, 8, 8), np.uint8)):
        with pytest.raises(ValueError, match=r"images are uint8 \[b h w 3\], not (float32|uint8) \["):
            extract(images)


def test_safetensors_need_no_torch(weights: Path, tmp_path: Path):
    pickle = tmp_path / "inception.pth"
    pickle.touch()
    code = f"""
import sys
sys.modules["torch"] = sys.modules["transformers"] = None  # an import of them fails
from maxdiff.features import efficientnet, inception
inception({str(weights)!r})
for load in (lambda: inception({str(pickle)!r}), efficientnet):
    try:
        load()
    except ImportError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    assert (len(lines), done.stderr) == (2, "")
    assert all(line.endswith("is a PyTorch pickle, which needs torch: pip install 'maxdiff[torch]'") for line in lines)
    assert "efficientnet-lite0" in lines[1]
