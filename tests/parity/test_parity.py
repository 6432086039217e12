"""Every network beside diffusers' or transformers', with the same weights: outputs, gradients, bfloat16."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from benchmarks import parity
from maxdiff.models.layers import Compute
from maxdiff.models.network import flatten
from maxdiff.weights.names import to_torch, torch_key


def torch_case(name: str, folder: Path) -> tuple[dict, dict, dict]:
    """Inputs, the peer's outputs, and its gradients of their mean square error to random targets."""
    variant = parity.VARIANTS[name]
    inputs = parity.make_inputs(variant, variant.small, variant.small_size, 2)
    module = parity.torch_module(variant, variant.small)
    module.save_pretrained(folder)
    outputs = parity.run_torch(variant, module, inputs)
    loss = sum(torch.mean((out - torch.from_numpy(target(key, tuple(out.shape)))) ** 2) for key, out in outputs.items())
    loss.backward()  # pyright: ignore[reportAttributeAccessIssue]
    grads = {k: p.grad.numpy() for k, p in module.named_parameters() if p.grad is not None}
    return inputs, {k: v.detach().numpy() for k, v in outputs.items()}, grads


def target(key: str, shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(len(key)).standard_normal(shape, np.float32)


@pytest.mark.parametrize("name", parity.VARIANTS)
def test_outputs_and_gradients_equal_torch(name: str, tmp_path: Path):
    variant = parity.VARIANTS[name]
    inputs, theirs, their_grads = torch_case(name, tmp_path)
    network, params = parity.load(variant, tmp_path)

    def loss(params: Any) -> Any:
        out = parity.run_ours(variant, network, params, inputs)
        return sum(jnp.mean(jnp.square(out[k] - target(k, out[k].shape))) for k in out), out

    grads, ours = jax.jit(jax.grad(loss, has_aux=True))(params)
    assert ours.keys() == theirs.keys()
    for key in theirs:
        assert parity.relative(ours[key], theirs[key]) <= 1e-5, key

    largest = max(float(np.linalg.norm(g)) for g in their_grads.values())
    found = {torch_key(path): to_torch(np.asarray(g)) if path[-1] == "kernel" else np.asarray(g) for path, g in flatten(grads)}
    for key, expected in their_grads.items():
        ours_here = found.pop(key if key in found else f"text_model.{key}")
        error = float(np.linalg.norm(ours_here - expected))
        assert error <= 1e-4 * max(float(np.linalg.norm(expected)), 1e-3 * largest), key
    # What torch gave no gradient (half of the autoencoder) has none here either.
    assert not any(np.any(g) for g in found.values())


@pytest.mark.parametrize("name", ["sd1-unet", "sdxl-unet", "vae-encoder", "vae-decoder", "clip-l", "openclip-bigg"])
def test_bfloat16_activations_stay_close(name: str, tmp_path: Path):
    variant = parity.VARIANTS[name]
    inputs, theirs, _ = torch_case(name, tmp_path)
    network, params = parity.load(variant, tmp_path, Compute(dtype=jnp.bfloat16))
    ours = jax.jit(lambda p: parity.run_ours(variant, network, p, inputs))(params)
    for key in theirs:
        assert parity.relative(ours[key], theirs[key]) <= 0.02, key


def test_attention_mask_equals_transformers():
    import transformers

    from maxdiff.models.clip import CLIPTextConfig, CLIPTextModel
    from maxdiff.models.network import Network
    from maxdiff.weights.load import load_params
    from maxdiff.weights.names import normalise
    from maxdiff.weights.tensors import Tensor

    config = parity.SMALL_CLIP
    torch.manual_seed(0)
    module = transformers.CLIPTextModel(transformers.CLIPTextConfig(**config)).eval()
    ids = np.random.default_rng(0).integers(0, 40000, (2, 20)).astype(np.int32)
    mask = (np.arange(20)[None] < np.array([[20], [7]])).astype(np.int32)
    with torch.no_grad():
        theirs = module(torch.from_numpy(ids).long(), attention_mask=torch.from_numpy(mask)).last_hidden_state.numpy()
    network = Network(CLIPTextModel, CLIPTextConfig(**config))
    tensors = {k: Tensor(tuple(v.shape), np.dtype(np.float32), v.numpy) for k, v in module.state_dict().items()}
    params = load_params(network, normalise(tensors, flax=False, text_encoder=True), "torch")
    with_mask = network.apply(params, ids, mask).last_hidden_state
    assert parity.relative(with_mask, theirs) <= 1e-5
    assert parity.relative(network.apply(params, ids).last_hidden_state[1], theirs[1]) > 1e-2
