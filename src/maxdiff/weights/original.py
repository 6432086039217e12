"""Single-file checkpoints in the layout of the original latent diffusion code (SD 1.x, 2.x, XL).

The file holds no configuration: the architecture is read off the keys and shapes, and the keys are
then those of a diffusers folder with that configuration. One table serves both directions.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from maxdiff.models.config import per_block
from maxdiff.models.unet import UNetConfig
from maxdiff.models.vae import VAEConfig
from maxdiff.weights import open_clip
from maxdiff.weights.names import count_modules, replace_module
from maxdiff.weights.tensors import Tensor, Tensors

UNET, VAE = "model.diffusion_model.", "first_stage_model."
# Where each text encoder lies: transformers' CLIP-L, or OpenCLIP's own naming.
CLIP_L = {"sd1": "cond_stage_model.transformer.", "sdxl": "conditioner.embedders.0.transformer."}
OPEN_CLIP = {"sd2": "cond_stage_model.model.", "sdxl": "conditioner.embedders.1.model."}
# What training left behind and inference never reads.
IGNORED = re.compile(
    r"^(model_ema\.|betas$|alphas_cumprod|sqrt_|log_one_minus|posterior_|logvar$|lvlb_weights$|scale_factor$|global_step$"
    r"|denoiser\.|v_pred$|ztsnr$|(first_stage_model\.)?loss\.)|logit_scale$|position_ids$|attn_mask$"
)

RESNET = {"in_layers.0": "norm1", "in_layers.2": "conv1", "emb_layers.1": "time_emb_proj", "out_layers.0": "norm2",
          "out_layers.3": "conv2", "skip_connection": "conv_shortcut"}  # fmt: skip
VAE_ATTENTION = {"norm": "group_norm", "q": "to_q", "k": "to_k", "v": "to_v", "proj_out": "to_out.0"}


def family(tensors: Mapping[str, Tensor]) -> str | None:
    """`sd1`, `sd2` or `sdxl`, by the text encoders in the file; None if it is no whole checkpoint."""
    for name, prefix in {**OPEN_CLIP, **CLIP_L}.items():
        if any(key.startswith(prefix) for key in tensors):
            return name
    return None


def unused(tensors: Mapping[str, Tensor]) -> list[str]:
    """Keys that belong to no part of a pipeline and are none of training's known leftovers."""
    known = (UNET, VAE, *CLIP_L.values(), *OPEN_CLIP.values())
    return [key for key in tensors if not IGNORED.search(key) and not key.startswith(known)]


def is_unet(tensors: Mapping[str, Tensor]) -> bool:
    """Whether a part's keys are the original UNet's."""
    return any(key.startswith("input_blocks.") for key in tensors)


def is_vae(tensors: Mapping[str, Tensor]) -> bool:
    """Whether a part's keys are the original autoencoder's."""
    return any(key.startswith("encoder.down.") for key in tensors)


def part(tensors: Mapping[str, Tensor], prefix: str) -> Tensors:
    """The tensors under `prefix` ("" for all), without it, leftovers dropped."""
    return {k.removeprefix(prefix): t for k, t in tensors.items() if k.startswith(prefix) and not IGNORED.search(k)}


# --- UNet ----------------------------------------------------------------------------------------------


def unet_config(tensors: Mapping[str, Tensor], sample_size: int) -> UNetConfig:
    """Read the UNet's architecture off its original keys (without prefix)."""
    channels: list[int] = []
    layers, depths = [0], [0]
    blocks = count_modules(tensors, "input_blocks.")
    for i in range(1, blocks):
        if f"input_blocks.{i}.0.op.weight" in tensors:
            layers.append(0)
            depths.append(0)
            continue
        if layers[-1] == 0:
            channels.append(tensors[f"input_blocks.{i}.0.in_layers.2.weight"].shape[0])
        layers[-1] += 1
        depths[-1] = count_modules(tensors, f"input_blocks.{i}.1.transformer_blocks.")
    attends = [depth > 0 for depth in depths]
    linear = len(tensors["middle_block.1.proj_in.weight"].shape) == 2
    added: dict[str, Any] = {}
    if "label_emb.0.0.weight" in tensors:
        added = {"addition_embed_type": "text_time", "addition_time_embed_dim": 256,
                 "projection_class_embeddings_input_dim": tensors["label_emb.0.0.weight"].shape[1]}  # fmt: skip
    middle = count_modules(tensors, "middle_block.1.transformer_blocks.")
    depths = [depth or 1 for depth in depths[:-1]] + [middle]
    return UNetConfig(
        sample_size=sample_size,
        in_channels=tensors["input_blocks.0.0.weight"].shape[1],
        out_channels=tensors["out.2.weight"].shape[0],
        down_block_types=tuple("CrossAttnDownBlock2D" if a else "DownBlock2D" for a in attends),
        up_block_types=tuple("CrossAttnUpBlock2D" if a else "UpBlock2D" for a in attends[::-1]),
        block_out_channels=tuple(channels),
        layers_per_block=layers[0] if len(set(layers)) == 1 else tuple(layers),
        cross_attention_dim=tensors["middle_block.1.transformer_blocks.0.attn2.to_k.weight"].shape[1],
        transformer_layers_per_block=1 if set(depths) == {1} else tuple(depths),
        # SD 1.x has 8 heads throughout, later models heads of 64 channels.
        attention_head_dim=tuple(max(c // 64, 1) for c in channels) if linear else 8,
        use_linear_projection=linear,
        **added,
    )


def unet_names(config: UNetConfig) -> dict[str, str]:
    """Original module -> diffusers module, for every module that holds blocks or layers."""
    n = len(config.block_out_channels)
    layers = per_block(config.layers_per_block, n, "layers_per_block")
    names = {
        "input_blocks.0.0": "conv_in",
        "time_embed.0": "time_embedding.linear_1",
        "time_embed.2": "time_embedding.linear_2",
        "label_emb.0.0": "add_embedding.linear_1",
        "label_emb.0.2": "add_embedding.linear_2",
        "middle_block.0": "mid_block.resnets.0",
        "middle_block.1": "mid_block.attentions.0",
        "middle_block.2": "mid_block.resnets.1",
        "out.0": "conv_norm_out",
        "out.2": "conv_out",
    }
    block = 1
    for i in range(n):
        for j in range(layers[i]):
            names[f"input_blocks.{block}.0"] = f"down_blocks.{i}.resnets.{j}"
            names[f"input_blocks.{block}.1"] = f"down_blocks.{i}.attentions.{j}"
            block += 1
        if i < n - 1:
            names[f"input_blocks.{block}.0.op"] = f"down_blocks.{i}.downsamplers.0.conv"
            block += 1
    block = 0
    for i, (count, kind) in enumerate(zip(layers[::-1], config.up_block_types, strict=True)):
        attends = kind == "CrossAttnUpBlock2D"
        for j in range(count + 1):
            names[f"output_blocks.{block}.0"] = f"up_blocks.{i}.resnets.{j}"
            if attends:
                names[f"output_blocks.{block}.1"] = f"up_blocks.{i}.attentions.{j}"
            if j == count and i < n - 1:
                names[f"output_blocks.{block}.{1 + attends}.conv"] = f"up_blocks.{i}.upsamplers.0.conv"
            block += 1
    return names


# --- Autoencoder ---------------------------------------------------------------------------------------


def vae_config(tensors: Mapping[str, Tensor], *, sdxl: bool, sample_size: int) -> VAEConfig:
    """Read the autoencoder's architecture off its original keys (without prefix)."""
    levels = count_modules(tensors, "encoder.down.")
    return VAEConfig(
        in_channels=tensors["encoder.conv_in.weight"].shape[1],
        out_channels=tensors["decoder.conv_out.weight"].shape[0],
        down_block_types=("DownEncoderBlock2D",) * levels,
        up_block_types=("UpDecoderBlock2D",) * levels,
        block_out_channels=tuple(tensors[f"encoder.down.{i}.block.0.conv1.weight"].shape[0] for i in range(levels)),
        layers_per_block=count_modules(tensors, "encoder.down.0.block."),
        latent_channels=tensors["post_quant_conv.weight"].shape[0],
        sample_size=sample_size,
        scaling_factor=0.13025 if sdxl else 0.18215,
        force_upcast=sdxl,
    )


def vae_names(config: VAEConfig) -> dict[str, str]:
    """Original module -> diffusers module."""
    n = len(config.block_out_channels)
    names = {"quant_conv": "quant_conv", "post_quant_conv": "post_quant_conv"}
    for half in ("encoder", "decoder"):
        names |= {
            f"{half}.{a}": f"{half}.{b}"
            for a, b in (("conv_in", "conv_in"), ("norm_out", "conv_norm_out"), ("conv_out", "conv_out"))
        }
        names |= {f"{half}.mid.block_{j + 1}": f"{half}.mid_block.resnets.{j}" for j in range(2)}
        names[f"{half}.mid.attn_1"] = f"{half}.mid_block.attentions.0"
    for i in range(n):
        for j in range(config.layers_per_block):
            names[f"encoder.down.{i}.block.{j}"] = f"encoder.down_blocks.{i}.resnets.{j}"
        names[f"encoder.down.{i}.downsample.conv"] = f"encoder.down_blocks.{i}.downsamplers.0.conv"
        # The original numbers the decoder's levels from the image inwards.
        for j in range(config.layers_per_block + 1):
            names[f"decoder.up.{n - 1 - i}.block.{j}"] = f"decoder.up_blocks.{i}.resnets.{j}"
        names[f"decoder.up.{n - 1 - i}.upsample.conv"] = f"decoder.up_blocks.{i}.upsamplers.0.conv"
    return names


# --- Keys of both, in both directions ------------------------------------------------------------------


def to_diffusers(tensors: Mapping[str, Tensor], names: Mapping[str, str]) -> Tensors:
    """Rename a part's original keys; a key that no name covers stays, and is reported when loading."""
    return {_rename(key, names, _inner): tensor for key, tensor in tensors.items()}


def from_diffusers(tensors: Mapping[str, Tensor], names: Mapping[str, str], *, vae: bool) -> Tensors:
    """The opposite of `to_diffusers`."""
    back = {new: old for old, new in names.items()}

    def inner(new: str, _: str, rest: str) -> str:
        if "resnets" in new:
            table = {"conv_shortcut": "nin_shortcut"} if vae else {b: a for a, b in RESNET.items()}
        elif vae and "attentions" in new:
            table = {b: a for a, b in VAE_ATTENTION.items()}
        else:
            return rest
        return replace_module(rest, table)

    renamed = {_rename(key, back, inner): tensor for key, tensor in tensors.items()}
    if vae:  # the original's attention projections are 1x1 convolutions
        for key, tensor in renamed.items():
            if ".attn_1." in key and len(tensor.shape) == 2:
                shape = (*tensor.shape, 1, 1)
                renamed[key] = tensor.map(lambda x, shape=shape: x.reshape(shape), shape)
    return renamed


def _inner(old: str, new: str, rest: str) -> str:
    if "resnets" in new:
        return replace_module(rest, {**RESNET, "nin_shortcut": "conv_shortcut"})
    if old.endswith("attn_1"):
        return replace_module(rest, VAE_ATTENTION)
    return rest


def _rename(key: str, names: Mapping[str, str], inner: Any) -> str:
    """Rename the longest known module that `key` lies in, then what follows it by `inner`."""
    pieces = key.split(".")
    for n in range(len(pieces) - 1, 0, -1):
        module = ".".join(pieces[:n])
        if module in names:
            return f"{names[module]}.{inner(module, names[module], '.'.join(pieces[n:]))}"
    return key


# --- Noise schedule ------------------------------------------------------------------------------------


def scheduler_config(kind: str, prediction_type: str, *, zero_snr: bool = False) -> dict[str, Any]:
    """The noise schedule that the family was trained with, as diffusers' scheduler_config.json."""
    betas = {"num_train_timesteps": 1000, "beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear",
             "trained_betas": None, "steps_offset": 1, "prediction_type": prediction_type}  # fmt: skip
    if zero_snr:
        betas["rescale_betas_zero_snr"] = True
    if kind == "sdxl":
        return {"_class_name": "EulerDiscreteScheduler", **betas, "timestep_spacing": "leading", "interpolation_type": "linear"}
    if kind == "sd2":
        return {"_class_name": "DDIMScheduler", **betas, "clip_sample": False, "set_alpha_to_one": False}
    return {"_class_name": "PNDMScheduler", **betas, "skip_prk_steps": True, "set_alpha_to_one": False}


def prediction_type(kind: str, keys: Mapping[str, Tensor], metadata: Mapping[str, str], path: Path) -> str:
    """What the checkpoint's UNet predicts, where the file says so; an SD 2.x file often does not.

    Raises:
        ValueError: for an SD 2.x checkpoint that does not say.
    """
    stated = metadata.get("modelspec.prediction_type", "").lower()
    if stated.startswith("v") or "v_pred" in keys:
        return "v_prediction"
    if stated.startswith("eps") or kind != "sd2":
        return "epsilon"
    raise ValueError(
        f"{path} does not say what its UNet predicts; "
        "pass prediction_type=epsilon (SD 2-base) or v_prediction (SD 2.1 at 768 px)"
    )


# --- A whole file ----------------------------------------------------------------------------------------


def join(parts: Mapping[str, Tensors], configs: Mapping[str, Any], path: Path) -> Tensors:
    """The tensors of a single file, from the parts' tensors by their PyTorch keys.

    Raises:
        ValueError: naming what a reader, who has only keys and shapes, would take for something else.
    """
    unet = from_diffusers(parts["unet"], unet_names(configs["unet"]), vae=False)
    vae = from_diffusers(parts["vae"], vae_names(configs["vae"]), vae=True)
    pieces = [(UNET, "unet", unet), (VAE, "vae", vae)]
    if "text_encoder_2" in parts:
        pieces.append((CLIP_L["sdxl"], "text_encoder", parts["text_encoder"]))
        pieces.append((OPEN_CLIP["sdxl"], "text_encoder_2", open_clip.transformers_to_open_clip(parts["text_encoder_2"])))
    elif configs["unet"].use_linear_projection:
        pieces.append((OPEN_CLIP["sd2"], "text_encoder", open_clip.transformers_to_open_clip(parts["text_encoder"])))
    else:
        pieces.append((CLIP_L["sd1"], "text_encoder", parts["text_encoder"]))
    for _, name, tensors in pieces:
        _check_expressible(name, tensors, configs[name], sdxl="text_encoder_2" in parts, path=path)
    return {prefix + key: tensor for prefix, _, tensors in pieces for key, tensor in tensors.items()}


# What decides the outputs and is not a shape; the rest is checked with the weights when the file is read.
UNWRITTEN = {
    "unet": ("attention_head_dim", "norm_num_groups", "norm_eps", "flip_sin_to_cos", "freq_shift", "time_cond_proj_dim",
             "addition_embed_type", "addition_time_embed_dim", "transformer_layers_per_block", "down_block_types",
             "up_block_types"),
    "vae": ("norm_num_groups", "scaling_factor"),
    "text_encoder": ("hidden_act", "num_attention_heads", "layer_norm_eps", "num_hidden_layers", "architectures"),
}  # fmt: skip


def _check_expressible(name: str, tensors: Tensors, config: Any, *, sdxl: bool, path: Path) -> None:
    """Compare what a reader would infer with what the network is."""
    if name == "unet":
        inferred: Any = unet_config(tensors, 64)
    elif name == "vae":
        inferred = vae_config(tensors, sdxl=sdxl, sample_size=512)
    elif open_clip.is_open_clip(tensors):
        inferred = open_clip.open_clip_config(tensors, projection=name == "text_encoder_2")
    else:
        inferred = open_clip.clip_config(tensors)
    blocks = len(getattr(config, "block_out_channels", ()))
    for key in UNWRITTEN[name.removesuffix("_2")]:
        ours, theirs = getattr(config, key), getattr(inferred, key)
        if blocks and key in ("attention_head_dim", "transformer_layers_per_block"):
            ours, theirs = per_block(ours, blocks, key), per_block(theirs, blocks, key)
        if ours != theirs:
            said = f"the {name} has {key}={ours!r}; a reader takes {theirs!r}"
            raise ValueError(f"{path}: the layout cannot say that {said}")
