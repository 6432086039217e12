"""OpenCLIP's text encoders, as single-file checkpoints of SD 2.x and SDXL hold them, and transformers' CLIP beside them."""

import re
from collections.abc import Iterator, Mapping

import numpy as np

from maxdiff.models.clip import CLIPTextConfig
from maxdiff.weights.names import count_modules, replace_module
from maxdiff.weights.tensors import Tensor, Tensors

OPEN_CLIP_LAYER = {"ln_1": "layer_norm1", "ln_2": "layer_norm2", "mlp.c_fc": "mlp.fc1", "mlp.c_proj": "mlp.fc2",
                   "attn.out_proj": "self_attn.out_proj"}  # fmt: skip


def is_open_clip(tensors: Mapping[str, Tensor]) -> bool:
    """Whether a part's keys are OpenCLIP's."""
    return any(key.startswith("transformer.resblocks.") for key in tensors)


def clip_config(tensors: Mapping[str, Tensor]) -> CLIPTextConfig:
    """The configuration of a CLIP-L encoder in transformers' own keys, and quick_gelu as OpenAI trained it."""
    vocab, width = tensors["text_model.embeddings.token_embedding.weight"].shape
    return CLIPTextConfig(
        vocab_size=vocab,
        hidden_size=width,
        intermediate_size=tensors["text_model.encoder.layers.0.mlp.fc1.weight"].shape[0],
        projection_dim=width,
        num_hidden_layers=count_modules(tensors, "text_model.encoder.layers."),
        num_attention_heads=max(width // 64, 1),
        max_position_embeddings=tensors["text_model.embeddings.position_embedding.weight"].shape[0],
        hidden_act="quick_gelu",
    )


def open_clip_config(tensors: Mapping[str, Tensor], *, projection: bool) -> CLIPTextConfig:
    """The configuration of an OpenCLIP encoder; without projection (SD 2.x) the last layer is left out.

    SD 2.x reads the penultimate layer, normed: diffusers keeps it as the last of one layer fewer, and so does
    a file that was written from there. The published ones have all 24, and the projection that belongs to the last.
    """
    vocab, width = tensors["token_embedding.weight"].shape
    layers = count_modules(tensors, "transformer.resblocks.")
    return CLIPTextConfig(
        vocab_size=vocab,
        hidden_size=width,
        intermediate_size=tensors["transformer.resblocks.0.mlp.c_fc.weight"].shape[0],
        projection_dim=tensors["text_projection"].shape[1] if "text_projection" in tensors else width,
        num_hidden_layers=layers - 1 if not projection and ("text_projection" in tensors or layers == 24) else layers,
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
            result[replace_module(key, top)] = tensor
    return result


def _open_clip_layer(layer: str, rest: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    if not rest.startswith("attn.in_proj_"):
        yield f"{layer}.{replace_module(rest, OPEN_CLIP_LAYER)}", tensor
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
                result[f"{layer}.{replace_module(rest, back)}"] = tensor
        else:
            result[replace_module(key, top)] = tensor
    return result
