from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from maxdiff.models.network import Network, flatten
from maxdiff.weights.checkpoint import make_network, open_checkpoint
from maxdiff.weights.load import load_params
from maxdiff.weights.names import from_torch, normalise, to_torch, to_torch_shape, torch_key
from maxdiff.weights.tensors import Tensor, Tensors


def network_and_tensors(folder: Path, part: str = "unet") -> tuple[Network, Tensors, str]:
    checkpoint = open_checkpoint(folder)
    config = checkpoint.config(part)
    assert config is not None
    return make_network(part, config), *checkpoint.tensors(part)


def test_wrong_tensors_are_listed(folders: dict[str, Path]):
    network, tensors, where = network_and_tensors(folders["sd1"])
    del tensors["conv_in.bias"], tensors["mid_block.resnets.0.conv1.weight"]
    tensors["class_embedding.weight"] = tensors["conv_out.bias"]
    with pytest.raises(ValueError, match="2 keys are missing: conv_in.bias, mid_block.resnets.0.conv1.weight; "
                                         "1 keys have no place in this network: class_embedding.weight") as error:  # fmt: skip
        load_params(network, tensors, where)
    assert str(error.value).startswith(f"{folders['sd1']}/unet/diffusion_pytorch_model.safetensors: ")


def test_wrong_shapes_are_listed(folders: dict[str, Path]):
    network, tensors, where = network_and_tensors(folders["inpaint"])
    tensors["conv_in.weight"] = Tensor((32, 4, 3, 3), np.dtype(np.float32), lambda: np.zeros((32, 4, 3, 3), np.float32))
    with pytest.raises(
        ValueError, match=r"conv_in.weight has shape \(32, 4, 3, 3\), the configuration makes it \(32, 9, 3, 3\)"
    ):
        load_params(network, tensors, where)


def test_long_lists_are_cut(folders: dict[str, Path]):
    network, tensors, where = network_and_tensors(folders["sd1"])
    with pytest.raises(ValueError, match=rf"{len(tensors)} keys are missing: .* and {len(tensors) - 8} more$"):
        load_params(network, {}, where)


def test_each_device_gets_its_slice(folders: dict[str, Path]):
    network, tensors, where = network_and_tensors(folders["sd1"])
    mesh = jax.make_mesh((2, 4), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)

    def placement(path, spec):
        del path
        split = next((i for i, n in enumerate(spec.shape) if n % 4 == 0), None)
        return NamedSharding(mesh, PartitionSpec(*("fsdp" if i == split else None for i in range(len(spec.shape)))))

    whole = dict(flatten(load_params(network, tensors, where)))
    for path, leaf in flatten(load_params(network, tensors, where, placement=placement)):
        assert leaf.sharding == placement(path, network.specs[path])
        np.testing.assert_array_equal(leaf, whole[path])


def test_weights_are_never_the_files_own_memory(folders: dict[str, Path], tmp_path: Path):
    import shutil

    folder = shutil.copytree(folders["sd1"], tmp_path / "copy")
    params = load_params(*network_and_tensors(folder))
    before = jax.tree.map(lambda x: np.array(x), params)
    file = folder / "unet" / "diffusion_pytorch_model.safetensors"
    size = file.stat().st_size
    with file.open("r+b") as f:  # somebody overwrites the file in place
        f.write(b"\0" * size)
    assert jax.tree.all(jax.tree.map(lambda a, b: np.array_equal(a, b), params, before))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_dtype_is_converted_on_the_way(folders: dict[str, Path], dtype):
    network, tensors, where = network_and_tensors(folders["sd1"], "vae")
    params = dict(flatten(load_params(network, tensors, where, dtype=dtype)))
    assert {leaf.dtype for leaf in params.values()} == {jnp.dtype(dtype)}
    path = ("encoder", "conv_in", "kernel")
    np.testing.assert_array_equal(params[path], from_torch(tensors[torch_key(path)].read()).astype(dtype))


def tensor(array: np.ndarray) -> Tensor:
    return Tensor(array.shape, array.dtype, lambda: array)


def test_old_names_are_understood():
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    old = {
        "encoder.mid_block.attentions.0.query.weight": tensor(x),
        "encoder.mid_block.attentions.0.proj_attn.bias": tensor(x[0]),
        "text_model.embeddings.position_ids": tensor(x),
    }
    assert set(normalise(old, flax=False, text_encoder=False)) == {
        "encoder.mid_block.attentions.0.to_q.weight",
        "encoder.mid_block.attentions.0.to_out.0.bias",
    }
    new = {"encoder.layers.0.mlp.fc1.weight": tensor(x), "text_projection.weight": tensor(x)}
    assert set(normalise(new, flax=False, text_encoder=True)) == {
        "text_model.encoder.layers.0.mlp.fc1.weight",
        "text_projection.weight",
    }


def test_flax_names_and_layouts():
    kernel = np.arange(3 * 3 * 2 * 5, dtype=np.float32).reshape(3, 3, 2, 5)
    flax = {
        "down_blocks_0.attentions_1.transformer_blocks_2.ff.net_0.proj.kernel": tensor(kernel[0, 0]),
        "down_blocks_0.resnets_0.conv1.kernel": tensor(kernel),
        "conv_norm_out.scale": tensor(kernel[0, 0, 0]),
        "text_model.embeddings.token_embedding.embedding": tensor(kernel[0, 0]),
    }
    found = normalise(flax, flax=True, text_encoder=False)
    np.testing.assert_array_equal(
        found["down_blocks.0.attentions.1.transformer_blocks.2.ff.net.0.proj.weight"].read(), kernel[0, 0].T
    )
    conv = found["down_blocks.0.resnets.0.conv1.weight"]
    assert conv.shape == (5, 2, 3, 3)
    np.testing.assert_array_equal(from_torch(conv.read()), kernel)
    assert {"conv_norm_out.weight", "text_model.embeddings.token_embedding.weight"} <= set(found)


def test_layouts_are_each_others_inverse():
    for shape in ((3, 5), (3, 3, 5, 7), (1, 1, 5, 7)):
        x = np.random.default_rng(0).standard_normal(shape)
        assert to_torch(x).shape == to_torch_shape(shape)
        np.testing.assert_array_equal(from_torch(to_torch(x)), x)


@pytest.mark.parametrize("kind", ["sd1", "sd2"])
def test_linear_layers_stored_as_convolutions_and_the_reverse(folders: dict[str, Path], kind: str):
    network, tensors, where = network_and_tensors(folders[kind])
    expected = dict(flatten(load_params(network, tensors, where)))
    other = {}
    for key, t in tensors.items():
        if ".proj_in.weight" in key or ".proj_out.weight" in key or ".conv_shortcut.weight" in key:
            shape = t.shape[:2] if len(t.shape) == 4 else (*t.shape, 1, 1)
            other[key] = t.map(lambda x, shape=shape: x.reshape(shape), shape)
    assert other
    for path, leaf in flatten(load_params(network, {**tensors, **other}, where)):
        np.testing.assert_array_equal(leaf, expected[path])
