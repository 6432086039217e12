import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import parity
from maxdiff.models import flops
from maxdiff.models.clip import CLIPTextConfig, CLIPTextModel
from maxdiff.models.layers import Compute, zeros
from maxdiff.models.network import Network, flatten
from maxdiff.models.unet import UNet2DConditionModel, UNetConfig
from maxdiff.models.vae import AutoencoderKL, VAEConfig
from maxdiff.task import REMAT


def shape(*dims: int, dtype=jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, dtype)


def unet(config: dict, compute: Compute | None = None) -> Network:
    return Network(UNet2DConditionModel, UNetConfig.from_dict(config), compute)


SMALL = parity.VARIANTS["sdxl-unet"].small


def small_inputs() -> tuple:
    x = parity.make_inputs(parity.VARIANTS["sdxl-unet"], SMALL, (8, 8), 2)
    return x["sample"], x["timesteps"], x["encoder_hidden_states"], {k: x[k] for k in ("text_embeds", "time_ids")}


@pytest.mark.parametrize(
    ("config", "count"), [(parity.SD1, 859_520_964), (parity.SD2, 865_910_724), (parity.SDXL, 2_567_463_684)]
)
def test_published_parameter_counts(config: dict, count: int):
    assert unet(config).num_parameters() == count


def test_abstract_init_of_the_full_unet_is_quick():
    start = time.perf_counter()
    abstract = unet(parity.SD1).abstract()
    assert time.perf_counter() - start < 2.0
    assert len(list(flatten(abstract))) == 686


# GFLOP of one image, counted with torch's FlopCounterMode on diffusers' and transformers' modules: total, convolution, matmul.
@pytest.mark.parametrize(
    ("config", "size", "total", "convolution", "matmul"),
    [
        (parity.SD1, 32, 180.11, 110.99, 60.57),
        (parity.SD1, 64, 803.27, 443.95, 233.28),
        (parity.SD2, 64, 804.26, 418.36, 259.84),
        (parity.SD2, 96, 2149.11, 941.31, 579.66),
        (parity.SDXL, 128, 6761.24, 1623.11, 4354.21),
    ],
)
def test_flops_of_unets(config: dict, size: int, total: float, convolution: float, matmul: float):
    network = unet(config)
    added = {"text_embeds": shape(1, 1280), "time_ids": shape(1, 6)} if config is parity.SDXL else None
    text = shape(1, 77, config["cross_attention_dim"])
    count = flops.count(network.apply, network.abstract(), shape(1, size, size, 4), shape(1), text, added)
    assert count.total / 1e9 == pytest.approx(total, rel=0.01)
    assert count.convolution / 1e9 == pytest.approx(convolution, rel=0.01)
    assert count.matmul / 1e9 == pytest.approx(matmul, rel=0.01)


@pytest.mark.parametrize(("size", "encoder", "decoder"), [(512, 1116.66, 2514.52), (1024, 4878.95, 10470.39)])
def test_flops_of_the_autoencoder(size: int, encoder: float, decoder: float):
    network = Network(AutoencoderKL, VAEConfig.from_dict(parity.VAE))
    latents = shape(1, size // 8, size // 8, 4)
    encode = flops.count(lambda p, x: network.apply(p, x, method="encode"), network.abstract(), shape(1, size, size, 3))
    decode = flops.count(lambda p, z: network.apply(p, z, method="decode"), network.abstract(), latents)
    assert encode.total / 1e9 == pytest.approx(encoder, rel=0.01)
    assert decode.total / 1e9 == pytest.approx(decoder, rel=0.01)


@pytest.mark.parametrize(("config", "total"), [(parity.CLIP_L, 13.30), (parity.CLIP_H, 45.13), (parity.CLIP_G, 97.86)])
def test_flops_of_text_encoders(config: dict, total: float):
    network = Network(CLIPTextModel, CLIPTextConfig.from_dict(config))
    count = flops.count(network.apply, network.abstract(), shape(1, 77, dtype=jnp.int32))
    assert count.total / 1e9 == pytest.approx(total, rel=0.01)


def test_flops_follow_loops_and_inner_functions():
    def twice(x):
        return jax.lax.scan(lambda c, _: (jax.checkpoint(jnp.dot)(c, c), None), x, length=2)[0]

    assert flops.count(jax.jit(twice), shape(4, 4)) == flops.Flops(matmul=2 * 2 * 4**3)


def test_init_depends_on_seed_and_path_alone():
    def init(layers: int, seed: int) -> dict:
        network = Network(CLIPTextModel, CLIPTextConfig(**{**parity.SMALL_CLIP, "num_hidden_layers": layers}))
        params = network.init(seed)
        assert jax.tree.map(jnp.shape, params) == jax.tree.map(lambda s: s.shape, network.abstract())
        return dict(flatten(params))

    first, again, deeper, other = init(1, 0), init(1, 0), init(2, 0), init(1, 1)
    for path, value in first.items():
        np.testing.assert_array_equal(value, again[path])
    # A parameter keeps its values when the network around it grows (its distribution is the same here).
    path = ("text_model", "embeddings", "token_embedding", "embedding")
    np.testing.assert_array_equal(first[path], deeper[path])
    assert not np.array_equal(first[path], other[path])
    assert np.std(first[path]) == pytest.approx(0.02, rel=0.01)
    layers = [deeper["text_model", "encoder", "layers", i, "mlp", "fc1", "kernel"] for i in range(2)]
    assert not np.array_equal(*layers)


def test_init_starts_as_latent_diffusion_does():
    specs = unet(SMALL).specs
    block = ("down_blocks", 1, "attentions", 0)
    zero = {("conv_out", "kernel"), ("down_blocks", 0, "resnets", 0, "conv2", "kernel"), (*block, "proj_out", "kernel")}
    assert all(specs[path].init is zeros for path in zero)
    spec = specs[(*block, "proj_in", "kernel")]
    kernel = np.asarray(spec.init(np.random.default_rng(0), spec.shape))
    assert np.abs(kernel).max() <= kernel.shape[0] ** -0.5
    assert kernel.std() == pytest.approx(kernel.shape[0] ** -0.5 / 3**0.5, rel=0.05)


def test_rematerialisation_changes_no_gradient():
    config = {**parity.SMALL, "block_out_channels": (32,), "down_block_types": (parity.CROSS_DOWN,),
              "up_block_types": (parity.CROSS_UP,), "attention_head_dim": 4}  # fmt: skip
    x = parity.make_inputs(parity.VARIANTS["sd1-unet"], config, (8, 8), 2)
    plain, remat, selective = (unet(config, Compute(remat=REMAT[name])) for name in ("none", "full", "selective"))
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda s: rng.standard_normal(s.shape, np.float32) * 0.1, plain.abstract())

    def gradient(network: Network):
        loss = lambda p: jnp.mean(jnp.square(network.apply(p, x["sample"], x["timesteps"], x["encoder_hidden_states"])))
        lowered = jax.jit(jax.grad(loss)).lower(params)
        text = lowered.as_text()
        counts = text.count("optimization_barrier"), text.count("stablehlo.convolution")
        return counts, dict(flatten(lowered.compile()(params)))

    (none, expected), (full, found), (some, also) = map(gradient, (plain, remat, selective))
    of = lambda *end: sum(path[-2:] == end for path in plain.specs)
    blocks = of("conv1", "kernel") + of("norm3", "scale")
    # One barrier marks each recomputed block: every residual and transformer block.
    assert (none[0], full[0], some[0]) == (0, blocks, blocks)
    # Of a residual block the first convolution is recomputed, but the last, on whose result no gradient depends, is not.
    assert (full[1] - none[1], some[1] - none[1]) == (of("conv1", "kernel"), 0)
    largest = max(np.linalg.norm(g) for g in expected.values())
    for path, value in expected.items():
        for other in (found, also):
            np.testing.assert_allclose(other[path], value, rtol=1e-4, atol=1e-6 * largest, err_msg=str(path))


def test_networks_use_what_they_are_handed():
    constrained, attended = [], []

    def constrain(x, axes):
        assert len(axes) == x.ndim
        constrained.append(axes)
        return x

    def attention(q, k, v, *, mask=None, precision=None):
        attended.append((q.shape, k.shape, precision))
        return q

    compute = Compute(jnp.bfloat16, jax.lax.Precision.HIGHEST, attention, constrain)
    network = unet(SMALL, compute)
    out = jax.eval_shape(network.apply, network.abstract(), *small_inputs())
    assert out.dtype == jnp.bfloat16
    blocks = sum(path[-3:] == ("attn1", "to_q", "kernel") for path in network.specs)
    assert len(attended) == 2 * blocks
    assert all(precision is jax.lax.Precision.HIGHEST for *_, precision in attended)
    assert {axes[0] for axes in constrained} == {"conv_batch", "activation_batch", None}


def test_every_large_parameter_can_be_split():
    # A rule for these names covers all but norms and biases; `geglu` and `out_c` are left whole on the tensor axis.
    for config in (parity.SD1, parity.SDXL):
        for path, spec in unet(config).specs.items():
            if path[-1] == "kernel":
                assert {"embed", "conv_out"} & set(spec.axes), path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"added_cond": None}, "needs added_cond with text_embeds and time_ids"),
        ({"sample": shape(2, 4, 8, 8)}, r"sample has shape \[2, 4, 8, 8\], but this network takes \[batch height width 4\]"),
        ({"timesteps": shape()}, r"timesteps has shape \[\], but this network takes \[2\]"),
        (
            {"encoder_hidden_states": shape(1, 77, 40)},
            r"encoder_hidden_states has shape \[1, 77, 40\], .* takes \[2 length 40\]",
        ),
        ({"added_cond": {"text_embeds": shape(2, 24), "time_ids": shape(2, 5)}}, r"time_ids has shape \[2, 5\]"),
        ({"timestep_cond": shape(2, 12)}, "timestep_cond is for distilled UNets"),
    ],
)
def test_inputs_that_do_not_fit_are_named(change: dict, message: str):
    network = unet(SMALL)
    names = ("sample", "timesteps", "encoder_hidden_states", "added_cond")
    inputs = {**dict(zip(names, small_inputs(), strict=True)), **change}
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda p, x: network.apply(p, **x), network.abstract(), inputs)


def test_methods_and_kernels_that_do_not_exist_are_named():
    network = Network(AutoencoderKL, VAEConfig.from_dict(parity.SMALL_VAE))
    with pytest.raises(ValueError, match=r"no method='__call__' \(an autoencoder has encode and decode\)"):
        jax.eval_shape(network.apply, network.abstract(), shape(1, 8, 8, 3))
    with pytest.raises(ValueError, match="attention='flash' is no function"):
        Compute(attention="flash")  # pyright: ignore[reportArgumentType]


def test_an_autoencoder_that_overflows_computes_in_float32_instead_of_float16():
    for upcast, dtype, expected in (
        (True, jnp.float16, jnp.float32),
        (True, jnp.bfloat16, jnp.bfloat16),
        (False, jnp.float16, jnp.float16),
    ):
        config = VAEConfig.from_dict({**parity.SMALL_VAE, "force_upcast": upcast})
        network = Network(AutoencoderKL, config, Compute(dtype=dtype))
        decode = lambda p, z, network=network: network.apply(p, z, method="decode")
        assert jax.eval_shape(decode, network.abstract(), shape(1, 4, 4, 4)).dtype == expected


def test_too_long_a_text_is_an_error():
    network = Network(CLIPTextModel, CLIPTextConfig(**parity.SMALL_CLIP))
    with pytest.raises(ValueError, match="78 tokens are more than max_position_embeddings=77"):
        jax.eval_shape(network.apply, network.abstract(), shape(1, 78, dtype=jnp.int32))


def test_latents_follow_their_formulas():
    from maxdiff.models.vae import Gaussian

    mean, logvar = jnp.full((2, 2, 2, 1), 0.5), jnp.full((2, 2, 2, 1), -1.0)
    latents = Gaussian(mean, logvar)
    np.testing.assert_allclose(latents.sample(jnp.ones_like(mean)), 0.5 + np.exp(-0.5), rtol=1e-6)
    np.testing.assert_allclose(latents.kl(), 4 * 0.5 * (0.25 + np.exp(-1) - 1 + 1), rtol=1e-6)
