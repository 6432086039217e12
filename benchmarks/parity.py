"""Our networks beside diffusers' and transformers', with the same random weights, on a CPU in float32.

    python benchmarks/parity.py                  small variants of every network (a minute or two)
    python benchmarks/parity.py --full           the real sizes (half an hour, 24 GB of memory, 11 GB of disk)
    python benchmarks/parity.py sdxl-unet --full one network

Prints a table: the largest absolute error, the relative L2 error ||ours - torch|| / ||torch||, and the
relative L2 error of our bfloat16 activations against our float32. Weights go through a folder that
diffusers or transformers writes, and our loader.
"""

import argparse
import dataclasses
import gc
import importlib.metadata
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import torch

from maxdiff.models.layers import Compute
from maxdiff.models.network import Network, Params
from maxdiff.weights.checkpoint import make_network, open_checkpoint
from maxdiff.weights.load import load_params

DOWN, CROSS_DOWN, UP, CROSS_UP = "DownBlock2D", "CrossAttnDownBlock2D", "UpBlock2D", "CrossAttnUpBlock2D"
Arrays = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Variant:
    """A network to compare: its part in a pipeline, two configurations, and the inputs' sizes."""

    part: str
    small: dict[str, Any]
    full: dict[str, Any] | None = None
    method: str = "__call__"
    small_size: tuple[int, int] = (16, 16)
    full_size: tuple[int, int] = (64, 64)


SD1 = {"sample_size": 64, "cross_attention_dim": 768, "attention_head_dim": 8}
SD2 = {"sample_size": 96, "cross_attention_dim": 1024, "attention_head_dim": (5, 10, 20, 20), "use_linear_projection": True,
       "upcast_attention": True}  # fmt: skip
SDXL = {
    "sample_size": 128, "cross_attention_dim": 2048, "attention_head_dim": (5, 10, 20), "use_linear_projection": True,
    "block_out_channels": (320, 640, 1280), "transformer_layers_per_block": (1, 2, 10),
    "down_block_types": (DOWN, CROSS_DOWN, CROSS_DOWN), "up_block_types": (CROSS_UP, CROSS_UP, UP),
    "addition_embed_type": "text_time", "addition_time_embed_dim": 256, "projection_class_embeddings_input_dim": 2816,
}  # fmt: skip
SMALL = {"block_out_channels": (32, 64), "layers_per_block": 1, "norm_num_groups": 16, "cross_attention_dim": 40,
         "down_block_types": (CROSS_DOWN, DOWN), "up_block_types": (UP, CROSS_UP)}  # fmt: skip
SMALL_LINEAR = {**SMALL, "attention_head_dim": (2, 4), "use_linear_projection": True}
SMALL_XL = {**SMALL_LINEAR, "down_block_types": (DOWN, CROSS_DOWN), "up_block_types": (CROSS_UP, UP),
            "transformer_layers_per_block": (1, 2), "addition_embed_type": "text_time", "addition_time_embed_dim": 16,
            "projection_class_embeddings_input_dim": 6 * 16 + 24}  # fmt: skip
# What no published model has together: uneven depths, odd sizes, a guidance embedding.
UNUSUAL = {**SMALL, "block_out_channels": (16, 32, 48), "down_block_types": (CROSS_DOWN, CROSS_DOWN, DOWN),
           "up_block_types": (UP, CROSS_UP, CROSS_UP), "attention_head_dim": (2, 4, 4), "layers_per_block": (1, 2, 1),
           "transformer_layers_per_block": (2, 1, 1), "norm_num_groups": 8, "flip_sin_to_cos": False, "freq_shift": 1,
           "time_cond_proj_dim": 12}  # fmt: skip
VAE = {"block_out_channels": (128, 256, 512, 512), "layers_per_block": 2, "down_block_types": ("DownEncoderBlock2D",) * 4,
       "up_block_types": ("UpDecoderBlock2D",) * 4, "sample_size": 512, "force_upcast": False}  # fmt: skip
SMALL_VAE = {**VAE, "block_out_channels": (16, 32, 48), "norm_num_groups": 8, "layers_per_block": 1, "sample_size": 32,
             "down_block_types": ("DownEncoderBlock2D",) * 3, "up_block_types": ("UpDecoderBlock2D",) * 3}  # fmt: skip
CLIP_L = {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12, "projection_dim": 768}
CLIP_H = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 23,
    "num_attention_heads": 16,
    "hidden_act": "gelu",
}
CLIP_G = {"hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32, "num_attention_heads": 20,
          "hidden_act": "gelu", "projection_dim": 1280, "architectures": ["CLIPTextModelWithProjection"]}  # fmt: skip
SMALL_CLIP = {"hidden_size": 48, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 3}

VARIANTS: dict[str, Variant] = {
    "sd1-unet": Variant("unet", {**SMALL, "attention_head_dim": 4}, SD1),
    "sd2-unet": Variant("unet", {**SMALL_LINEAR, "upcast_attention": True}, SD2, full_size=(96, 96)),
    "sdxl-unet": Variant("unet", SMALL_XL, SDXL, full_size=(128, 128)),
    "inpainting-unet": Variant("unet", {**SMALL, "attention_head_dim": 4, "in_channels": 9}, {**SD1, "in_channels": 9}),
    "unusual-unet": Variant("unet", UNUSUAL, small_size=(13, 10)),
    "vae-encoder": Variant("vae", SMALL_VAE, VAE, "encode", (32, 48), (512, 512)),
    "vae-decoder": Variant("vae", SMALL_VAE, VAE, "decode", (4, 6), (64, 64)),
    "clip-l": Variant("text_encoder", SMALL_CLIP, CLIP_L),
    "clip-l-old-eos": Variant("text_encoder", {**SMALL_CLIP, "eos_token_id": 2}),
    "openclip-h": Variant("text_encoder", {**SMALL_CLIP, "hidden_act": "gelu"}, CLIP_H),
    "openclip-bigg": Variant("text_encoder_2", {**SMALL_CLIP, "hidden_act": "gelu", "projection_dim": 24,
                                                "architectures": ["CLIPTextModelWithProjection"]}, CLIP_G),
}  # fmt: skip


def torch_module(variant: Variant, config: dict[str, Any]) -> torch.nn.Module:
    """The peer, with every parameter random (norms too, whose default is one and zero)."""
    import diffusers
    import transformers

    torch.manual_seed(0)
    if variant.part == "unet":
        module = diffusers.UNet2DConditionModel(**config)
    elif variant.part == "vae":
        module = diffusers.AutoencoderKL(**config)
    else:
        kind = config.get("architectures", ["CLIPTextModel"])[0]
        module = getattr(transformers, kind)(transformers.CLIPTextConfig(**config))
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return module.eval()


def make_inputs(variant: Variant, config: dict[str, Any], size: tuple[int, int], batch: int) -> Arrays:
    """Random inputs by our argument names, in our layout."""
    rng = np.random.default_rng(1)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32)

    if variant.part == "vae":
        return {"images": normal(batch, *size, 3)} if variant.method == "encode" else {"latents": normal(batch, *size, 4)}
    if variant.part != "unet":
        ids = rng.integers(1000, 40000, (batch, 77))
        for row, end in zip(ids, (20, 9, 76), strict=False):  # the text ends early, and padding follows
            row[end:] = 49407
        ids[:, 0] = 49406
        return {"input_ids": ids.astype(np.int32)}
    inputs = {
        "sample": normal(batch, *size, config.get("in_channels", 4)),
        "timesteps": np.array([3, 821, 500][:batch], np.int32),
        "encoder_hidden_states": normal(batch, 77, config["cross_attention_dim"]),
    }
    if config.get("addition_embed_type"):
        width = config["projection_class_embeddings_input_dim"] - 6 * config["addition_time_embed_dim"]
        inputs["text_embeds"] = normal(batch, width)
        inputs["time_ids"] = np.array([[1024, 768, 0, 16, 1024, 1024], [512, 512, 8, 0, 512, 256]][:batch], np.float32)
    if config.get("time_cond_proj_dim"):
        inputs["timestep_cond"] = normal(batch, config["time_cond_proj_dim"])
    return inputs


def run_torch(variant: Variant, module: Any, inputs: Arrays) -> dict[str, torch.Tensor]:
    """The peer's outputs, in torch's layout."""
    given = {k: torch.from_numpy(v) for k, v in inputs.items()}
    if variant.part == "vae":
        if variant.method == "encode":
            moments = module.encode(given["images"].permute(0, 3, 1, 2)).latent_dist
            return {"mean": moments.mean, "logvar": moments.logvar}
        return {"image": module.decode(given["latents"].permute(0, 3, 1, 2)).sample}
    if variant.part != "unet":
        out = module(given["input_ids"].long(), output_hidden_states=True)
        states = {"last": out.last_hidden_state, "penultimate": out.hidden_states[-2]}
        return states | ({"embeds": out.text_embeds} if hasattr(out, "text_embeds") else {"pooled": out.pooler_output})
    added = {k: given[k] for k in ("text_embeds", "time_ids") if k in given}
    out = module(
        given["sample"].permute(0, 3, 1, 2), given["timesteps"], given["encoder_hidden_states"],
        added_cond_kwargs=added or None, timestep_cond=given.get("timestep_cond"),
    )  # fmt: skip
    return {"prediction": out.sample}


def run_ours(variant: Variant, network: Network, params: Params, inputs: Arrays) -> dict[str, jax.Array]:
    """Our outputs, in torch's layout: a function to be jitted."""
    given: dict[str, Any] = dict(inputs)
    if variant.part == "unet":
        added = {k: given.pop(k) for k in ("text_embeds", "time_ids") if k in given}
        return {"prediction": network.apply(params, **given, added_cond=added or None).transpose(0, 3, 1, 2)}
    out = network.apply(params, *given.values(), method=variant.method)
    if variant.part == "vae":
        return {
            k: v.transpose(0, 3, 1, 2) for k, v in (out._asdict() if variant.method == "encode" else {"image": out}).items()
        }
    states = {"last": out.last_hidden_state, "penultimate": out.hidden_states[-2]}
    return states | ({"pooled": out.pooled} if out.text_embeds is None else {"embeds": out.text_embeds})


def load(variant: Variant, folder: Path, compute: Compute | None = None) -> tuple[Network, Params]:
    """The same weights in our network, from the folder that the peer wrote."""
    checkpoint = open_checkpoint(folder)
    config = checkpoint.config(variant.part)
    assert config is not None
    network = make_network(variant.part, config, compute)
    return network, load_params(network, *checkpoint.tensors(variant.part))


def max_abs(ours: Any, theirs: Any) -> float:
    """Largest absolute difference."""
    return float(np.max(np.abs(np.asarray(ours, np.float32) - np.asarray(theirs, np.float32))))


def relative(ours: Any, theirs: Any) -> float:
    """||ours - theirs|| / ||theirs||, in float64."""
    a, b = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def compare(variant: Variant, folder: Path, *, full: bool) -> tuple[dict[str, float], int]:
    """Run both on the same weights and inputs: the worst errors over the outputs, and the number of parameters."""
    config = variant.full if full else variant.small
    assert config is not None
    inputs = make_inputs(variant, config, variant.full_size if full else variant.small_size, 1 if full else 2)
    module = torch_module(variant, config)
    with torch.no_grad():
        theirs = {k: v.numpy() for k, v in run_torch(variant, module, inputs).items()}
    module.save_pretrained(folder)
    del module
    gc.collect()
    network, params = load(variant, folder)

    def outputs(compute: Compute) -> dict[str, np.ndarray]:
        function = jax.jit(lambda p, x: run_ours(variant, network.with_compute(compute), p, x))
        return {k: np.asarray(v, np.float32) for k, v in function(params, inputs).items()}

    ours, low = outputs(Compute()), outputs(Compute(dtype=jnp.bfloat16))
    errors = {
        "max_abs": max(max_abs(ours[k], theirs[k]) for k in theirs),
        "relative": max(relative(ours[k], theirs[k]) for k in theirs),
        "bfloat16": max(relative(low[k], ours[k]) for k in theirs),
    }
    return errors, network.num_parameters()


def header() -> Iterable[str]:
    """Where the figures come from."""
    packages = ("jax", "flax", "torch", "diffusers", "transformers")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages)
    machine = f"{os.cpu_count()} cores of {processor()}, Python {platform.python_version()}"
    yield f"{time.strftime('%Y-%m-%d')}, {machine}, {versions}"
    yield ""
    yield "| network | parameters | size | max abs error | relative L2 error | bfloat16, relative L2 | seconds |"
    yield "|---|---|---|---|---|---|---|"


def processor() -> str:
    """The processor's name."""
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        if line.startswith("model name"):
            return line.split(":")[1].strip()
    return platform.processor() or "an unknown processor"


def main(argv: list[str], say: Callable[[str], None] = print) -> int:
    """Print the table; 1 if an error is above its bound (1e-5 small, 1e-4 full, 2% in bfloat16)."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", help=f"any of: {', '.join(VARIANTS)}")
    parser.add_argument("--full", action="store_true", help="the real sizes")
    args = parser.parse_args(argv)
    if unknown := [name for name in args.networks if name not in VARIANTS]:
        parser.error(f"unknown network {unknown[0]!r} (allowed: {', '.join(VARIANTS)})")
    for line in header():
        say(line)
    failed = False
    for name in args.networks or VARIANTS:
        variant = VARIANTS[name]
        config = variant.full if args.full else variant.small
        if config is None:
            continue
        start = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            error, parameters = compare(variant, Path(folder), full=args.full)
        height, width = variant.full_size if args.full else variant.small_size
        size = "77 tokens" if variant.part.startswith("text") else f"{height}x{width}"
        say(f"| {name} | {parameters:,} | {size} | {error['max_abs']:.1e} | {error['relative']:.1e} "
            f"| {error['bfloat16']:.1%} | {time.monotonic() - start:.0f} |")  # fmt: skip
        sys.stdout.flush()
        failed |= error["relative"] > (1e-4 if args.full else 1e-5) or error["bfloat16"] > 0.02
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
