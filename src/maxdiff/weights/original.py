"""Single-file checkpoints in the layout of the original latent diffusion code (SD 1.x, 2.x, XL).

The file holds no configuration: the architecture is read off the keys and shapes, and the keys are
then those of a diffusers folder with that configuration. One table serves both directions.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from maxdiff.models.clip import CLIPTextConfig
from maxdiff.models.config import per_block
from maxdiff.models.unet import UNetConfig
from maxdiff.models.vae import VAEConfig
from maxdiff.weights.tensors import Tensor, Tensors

UNET, VAE = "model.diffusion_model.", "first_stage_model."
# Where each text encoder lies: transformers' CLIP-L, or OpenCLIP's own naming.
CLIP_L = {"sd1": "cond_stage_model.transformer.", "sdxl": "conditioner.embedders.0.transformer."}
OPEN_CLIP = {"sd2": "cond_stage_model.model.", "sdxl": "conditioner.embedders.1.model."}
# What training left behind and inference never reads.
IGNORED = re.compile(
    r"^(model_ema\.|betas$|alphas_cumprod|sqrt_|log_one_minus|posterior_|logvar$|lvlb_weights$|scale_factor$|global_step$"
    r"|denoiser\.|v_pred$|ztsnr$|first_stage_model\.loss\.)|logit_scale$|position_ids$|attn_mask$"
)

RESNET = {"in_layers.0": "norm1", "in_layers.2": "conv1", "emb_layers.1": "time_emb_proj", "out_layers.0": "norm2",
          "out_layers.3": "conv2", "skip_connection": "conv_shortcut"}  # fmt: skip
VAE_ATTENTION = {"norm": "group_norm", "q": "to_q", "k": "to_k", "v": "to_v", "proj_out": "to_out.0"}
OPEN_CLIP_LAYER = {"ln_1": "layer_norm1", "ln_2": "layer_norm2", "mlp.c_fc": "mlp.fc1", "mlp.c_proj": "mlp.fc2",
                   "attn.out_proj": "self_attn.out_proj"}  # fmt: skip


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


def part(tensors: Mapping[str, Tensor], prefix: str) -> Tensors:
    """The tensors under `prefix`, without it, leftovers dropped."""
    return {k.removeprefix(prefix): t for k, t in tensors.items() if k.startswith(prefix) and not IGNORED.search(k)}


# --- UNet ----------------------------------------------------------------------------------------------


def unet_config(tensors: Mapping[str, Tensor], sample_size: int) -> UNetConfig:
    """Read the UNet's architecture off its original keys (without prefix)."""
    channels: list[int] = []
    layers, depths = [0], [0]
    blocks = 1 + max(int(key.split(".")[1]) for key in tensors if key.startswith("input_blocks."))
    for i in range(1, blocks):
        if f"input_blocks.{i}.0.op.weight" in tensors:
            layers.append(0)
            depths.append(0)
            continue
        if layers[-1] == 0:
            channels.append(tensors[f"input_blocks.{i}.0.in_layers.2.weight"].shape[0])
        layers[-1] += 1
        depths[-1] = _count(tensors, f"input_blocks.{i}.1.transformer_blocks.")
    attends = [depth > 0 for depth in depths]
    key = next(key for key in tensors if key.endswith("attn2.to_k.weight"))
    linear = len(tensors["middle_block.1.proj_in.weight"].shape) == 2
    added: dict[str, Any] = {}
    if "label_emb.0.0.weight" in tensors:
        added = {"addition_embed_type": "text_time", "addition_time_embed_dim": 256,
                 "projection_class_embeddings_input_dim": tensors["label_emb.0.0.weight"].shape[1]}  # fmt: skip
    middle = _count(tensors, "middle_block.1.transformer_blocks.")
    depths = [depth or 1 for depth in depths[:-1]] + [middle]
    return UNetConfig(
        sample_size=sample_size,
        in_channels=tensors["input_blocks.0.0.weight"].shape[1],
        out_channels=tensors["out.2.weight"].shape[0],
        down_block_types=tuple("CrossAttnDownBlock2D" if a else "DownBlock2D" for a in attends),
        up_block_types=tuple("CrossAttnUpBlock2D" if a else "UpBlock2D" for a in attends[::-1]),
        block_out_channels=tuple(channels),
        layers_per_block=layers[0] if len(set(layers)) == 1 else tuple(layers),
        cross_attention_dim=tensors[key].shape[1],
        transformer_layers_per_block=1 if set(depths) == {1} else tuple(depths),
        # SD 1.x has 8 heads throughout, later models heads of 64 channels.
        attention_head_dim=tuple(max(c // 64, 1) for c in channels) if linear else 8,
        use_linear_projection=linear,
        **added,
    )


def _count(tensors: Mapping[str, Tensor], prefix: str) -> int:
    return len({key.removeprefix(prefix).split(".")[0] for key in tensors if key.startswith(prefix)})


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
    levels = _count(tensors, "encoder.down.")
    return VAEConfig(
        in_channels=tensors["encoder.conv_in.weight"].shape[1],
        out_channels=tensors["decoder.conv_out.weight"].shape[0],
        down_block_types=("DownEncoderBlock2D",) * levels,
        up_block_types=("UpDecoderBlock2D",) * levels,
        block_out_channels=tuple(tensors[f"encoder.down.{i}.block.0.conv1.weight"].shape[0] for i in range(levels)),
        layers_per_block=_count(tensors, "encoder.down.0.block."),
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
        return _replace_module(rest, table)

    renamed = {_rename(key, back, inner): tensor for key, tensor in tensors.items()}
    if vae:  # the original's attention projections are 1x1 convolutions
        for key, tensor in renamed.items():
            if ".attn_1." in key and len(tensor.shape) == 2:
                shape = (*tensor.shape, 1, 1)
                renamed[key] = tensor.map(lambda x, shape=shape: x.reshape(shape), shape)
    return renamed


def _inner(old: str, new: str, rest: str) -> str:
    if "resnets" in new:
        return _replace_module(rest, {**RESNET, "nin_shortcut": "conv_shortcut"})
    if old.endswith("attn_1"):
        return _replace_module(rest, VAE_ATTENTION)
    return rest


def _replace_module(rest: str, table: Mapping[str, str]) -> str:
    module, _, leaf = rest.rpartition(".")
    return f"{table.get(module, module)}.{leaf}"


def _rename(key: str, names: Mapping[str, str], inner: Any) -> str:
    """Rename the longest known module that `key` lies in, then what follows it by `inner`."""
    pieces = key.split(".")
    for n in range(len(pieces) - 1, 0, -1):
        module = ".".join(pieces[:n])
        if module in names:
            return f"{names[module]}.{inner(module, names[module], '.'.join(pieces[n:]))}"
    return key


# --- Text encoders -------------------------------------------------------------------------------------


def clip_config(tensors: Mapping[str, Tensor]) -> CLIPTextConfig:
    """The configuration of a CLIP-L encoder in transformers' own keys, and quick_gelu as OpenAI trained it."""
    vocab, width = tensors["text_model.embeddings.token_embedding.weight"].shape
    return CLIPTextConfig(
        vocab_size=vocab,
        hidden_size=width,
        intermediate_size=tensors["text_model.encoder.layers.0.mlp.fc1.weight"].shape[0],
        projection_dim=width,
        num_hidden_layers=_count(tensors, "text_model.encoder.layers."),
        num_attention_heads=max(width // 64, 1),
        max_position_embeddings=tensors["text_model.embeddings.position_embedding.weight"].shape[0],
        hidden_act="quick_gelu",
    )


def open_clip_config(tensors: Mapping[str, Tensor], *, projection: bool) -> CLIPTextConfig:
    """The configuration of an OpenCLIP encoder; without projection (SD 2.x) the last layer is left out.

    SD 2.x reads the penultimate layer, normed: diffusers keeps it as the last of one layer fewer. A file
    with 23 layers has been through that already.
    """
    vocab, width = tensors["token_embedding.weight"].shape
    layers = _count(tensors, "transformer.resblocks.")
    return CLIPTextConfig(
        vocab_size=vocab,
        hidden_size=width,
        intermediate_size=tensors["transformer.resblocks.0.mlp.c_fc.weight"].shape[0],
        projection_dim=tensors["text_projection"].shape[1] if "text_projection" in tensors else width,
        num_hidden_layers=layers if projection or layers == 23 else layers - 1,
        num_attention_heads=max(width // 64, 1),
        max_position_embeddings=tensors["positional_embedding"].shape[0],
        hidden_act="gelu",
        architectures=("CLIPTextModelWithProjection",) if projection else ("CLIPTextModel",),
    )


def open_clip_to_transformers(tensors: Mapping[str, Tensor], config: CLIPTextConfig) -> Tensors:
    """OpenCLIP's keys -> transformers': the fused projection split in three, the text projection turned."""
    result: Tensors = {}
    top = {"token_embedding": "text_model.embeddings.token_embedding", "ln_final": "text_model.final_layer_norm"}
    for key, tensor in tensors.items():
        if key == "positional_embedding":
            result["text_model.embeddings.position_embedding.weight"] = tensor
        elif key == "text_projection":
            if config.with_projection:
                result["text_projection.weight"] = tensor.map(np.transpose, tensor.shape[::-1])
        elif match := re.fullmatch(r"transformer\.resblocks\.(\d+)\.(.*)", key):
            if int(match[1]) < config.num_hidden_layers:
                layer = f"text_model.encoder.layers.{match[1]}"
                result.update(_open_clip_layer(layer, match[2], tensor))
        else:
            result[_replace_module(key, top)] = tensor
    return result


def _open_clip_layer(layer: str, rest: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    if not rest.startswith("attn.in_proj_"):
        yield f"{layer}.{_replace_module(rest, OPEN_CLIP_LAYER)}", tensor
        return
    leaf, width = rest.removeprefix("attn.in_proj_"), tensor.shape[0] // 3
    for i, name in enumerate(("q_proj", "k_proj", "v_proj")):
        third = slice(i * width, (i + 1) * width)
        yield f"{layer}.self_attn.{name}.{leaf}", tensor.map(lambda x, third=third: x[third], (width, *tensor.shape[1:]))


def transformers_to_open_clip(tensors: Mapping[str, Tensor]) -> Tensors:
    """The opposite of `open_clip_to_transformers`; the last layer that SD 2.x never had stays away."""
    result: Tensors = {}
    back = {b: a for a, b in OPEN_CLIP_LAYER.items()}
    top = {"text_model.embeddings.token_embedding": "token_embedding", "text_model.final_layer_norm": "ln_final"}
    for key, tensor in tensors.items():
        if key == "text_model.embeddings.position_embedding.weight":
            result["positional_embedding"] = tensor
        elif key == "text_projection.weight":
            result["text_projection"] = tensor.map(np.transpose, tensor.shape[::-1])
        elif match := re.fullmatch(r"text_model\.encoder\.layers\.(\d+)\.(.*)", key):
            layer, rest = f"transformer.resblocks.{match[1]}", match[2]
            if fused := re.fullmatch(r"self_attn\.(q|k|v)_proj\.(weight|bias)", rest):
                if fused[1] == "q":
                    parts = [tensors[key.replace(".q_proj.", f".{p}_proj.")] for p in "qkv"]
                    shape = (3 * tensor.shape[0], *tensor.shape[1:])
                    read = lambda parts=parts: np.concatenate([p.read() for p in parts])
                    result[f"{layer}.attn.in_proj_{fused[2]}"] = Tensor(shape, tensor.dtype, read)
            else:
                result[f"{layer}.{_replace_module(rest, back)}"] = tensor
        else:
            result[_replace_module(key, top)] = tensor
    return result


def scheduler_config(kind: str, prediction_type: str) -> dict[str, Any]:
    """The noise schedule that the family was trained with, as diffusers' scheduler_config.json."""
    betas = {"num_train_timesteps": 1000, "beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear",
             "trained_betas": None, "steps_offset": 1, "prediction_type": prediction_type}  # fmt: skip
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
