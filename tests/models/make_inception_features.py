"""Makes inception_features.npz, with which test_inception.py compares: what pytorch-fid and clean-fid say of random images.

    pip install pytorch-fid==0.3.0 clean-fid==0.1.35 && python -m tests.models.make_inception_features

Both need a torchvision made for the very torch beside it, which a test's environment has not always. So the figures are here
and the packages are not. Weights and images follow from `random_inception` and `random_images` alone.
"""

import zlib
from pathlib import Path

import numpy as np

from maxdiff.models.inception import InceptionV3
from maxdiff.models.network import Network
from maxdiff.weights.names import to_torch_shape, torch_key

FILE = Path(__file__).parent / "inception_features.npz"
# Every so many pixels in each direction are kept.
EVERY = 13


def random_weights(shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Weights by their PyTorch keys with which activations neither vanish nor explode (He et al. 2015)."""
    weights = {}
    for key, shape in shapes.items():
        numbers = np.random.Generator(np.random.Philox(zlib.crc32(key.encode()))).random(shape, np.float32)
        if len(shape) > 1:
            fan_in = np.prod(shape[1:])
            weights[key] = (2 * numbers - 1) * np.float32((6 / fan_in) ** 0.5)
        elif key.endswith((".running_var", ".weight")):
            weights[key] = numbers + np.float32(0.5)
        else:
            weights[key] = (numbers - np.float32(0.5)) / 2
    return weights


def torch_shapes(network: Network) -> dict[str, tuple[int, ...]]:
    """The network's parameters as a PyTorch file has them."""
    return {
        torch_key(path): to_torch_shape(spec.shape) if path[-1] == "kernel" else spec.shape
        for path, spec in network.specs.items()
    }


def random_inception() -> dict[str, np.ndarray]:
    """Weights of InceptionV3 by pytorch-fid's keys, its classifier's too."""
    shapes = torch_shapes(Network(InceptionV3, None))
    return random_weights({**shapes, "fc.weight": (1008, 2048), "fc.bias": (1008,)})


def random_images(height: int, width: int) -> np.ndarray:
    """Two uint8 images [2 h w 3]: noise, and noise of large patches."""
    numbers = np.random.Generator(np.random.Philox(height * 1000 + width)).random((2, height, width, 3), np.float32)
    patches = np.kron(numbers[1, : height // 16 + 1, : width // 16 + 1], np.ones((16, 16, 1), np.float32))
    return (np.stack([numbers[0], patches[:height, :width]]) * 256).astype(np.uint8)


SMALL, LARGE = (67, 123), (401, 350)


def main() -> None:
    import torch
    from cleanfid.resize import build_resizer
    from pytorch_fid import inception

    weights = {key: torch.from_numpy(value) for key, value in random_inception().items()}
    counts = {f"{key.rpartition('.')[0]}.num_batches_tracked": torch.tensor(0) for key in weights if key.endswith("_var")}
    inception.load_state_dict_from_url = lambda *_, **__: {**weights, **counts}
    network = inception.InceptionV3().eval()
    found = {}
    for name, size in (("small", SMALL), ("large", LARGE)):
        images = random_images(*size)
        with torch.no_grad():
            tensor = torch.from_numpy(images).permute(0, 3, 1, 2).float() / 255
            found[f"features_{name}"] = network(tensor)[0][:, :, 0, 0].numpy()
            bilinear = torch.nn.functional.interpolate(tensor, (299, 299), mode="bilinear", align_corners=False)
        found[f"pytorch_fid_{name}"] = (2 * bilinear - 1).permute(0, 2, 3, 1).numpy()[:, ::EVERY, ::EVERY]
        clean = np.stack([build_resizer("clean")(image) for image in images])
        found[f"clean_fid_{name}"] = ((clean - 128) / 128)[:, ::EVERY, ::EVERY]
    np.savez_compressed(FILE, **{key: value.astype(np.float32) for key, value in found.items()})


if __name__ == "__main__":
    main()
