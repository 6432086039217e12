import dataclasses
import json
import re

import pytest

from maxdiff.models.clip import CLIPTextConfig
from maxdiff.models.unet import UNetConfig
from maxdiff.models.vae import VAEConfig


@pytest.mark.parametrize(
    ("config", "values", "message"),
    [
        (UNetConfig, {"num_class_embeds": 1000}, "num_class_embeds=1000 is not supported (allowed: None)"),
        (UNetConfig, {"act_fn": "relu"}, "act_fn='relu' is not supported (allowed: 'silu', 'swish')"),
        (UNetConfig, {"center_input_sample": True}, "center_input_sample=True is not supported (allowed: False)"),
        (UNetConfig, {"downsample_padding": True}, "downsample_padding=True is not supported (allowed: 1)"),
        (UNetConfig, {"addition_embed_type": "image"}, "addition_embed_type='image' is not supported (allowed: None, 'text_time')"),
        (UNetConfig, {"addition_embed_type": "text_time"}, "addition_time_embed_dim=None is not supported (allowed: positive integers)"),
        (UNetConfig, {"block_out_channels": [320, 0, 1, 1]}, "block_out_channels=(320, 0, 1, 1) is not supported"),
        (UNetConfig, {"block_out_channels": [320, 640]}, "down_block_types="),
        (UNetConfig, {"layers_per_block": [2, 2]}, "layers_per_block=(2, 2) has 2 values for 4 blocks"),
        (UNetConfig, {"cross_attention_dim": [768, 1, 1, 1]}, "cross_attention_dim=(768, 1, 1, 1) is not supported"),
        (UNetConfig, {"down_block_types": ["AttnDownBlock2D"] * 4}, "down_block_types='AttnDownBlock2D' is not supported"),
        (UNetConfig, {"attention_head_dim": "8"}, "attention_head_dim='8' is not supported (allowed: int | tuple[int, ...])"),
        (UNetConfig, {"norm_eps": "1e-5"}, "norm_eps='1e-5' is not supported (allowed: float)"),
        (UNetConfig, {"use_linear_projection": "no"}, "use_linear_projection='no' is not supported (allowed: bool)"),
        (UNetConfig, {"norm_num_groups": 33}, "norm_num_groups=33 does not divide block_out_channels="),
        (UNetConfig, {"attention_head_dim": 7}, "attention_head_dim=7 does not divide block_out_channels="),
        (UNetConfig, {"transformer_layers_per_block": 0}, "transformer_layers_per_block=0 is not supported"),
        (CLIPTextConfig, {"eos_token_id": None}, "eos_token_id=None is not supported (allowed: int)"),
        (UNetConfig, {"brand_new": "yes"}, "brand_new='yes' is not supported (the key is unknown)"),
        (VAEConfig, {"latents_mean": [0.0]}, "latents_mean=(0.0,) is not supported (allowed: None)"),
        (VAEConfig, {"down_block_types": ["AttnDownEncoderBlock2D"]}, "down_block_types=('AttnDownEncoderBlock2D',) is not supported"),
        (CLIPTextConfig, {"hidden_act": "relu"}, "hidden_act='relu' is not supported (allowed: 'quick_gelu', 'gelu')"),
        (CLIPTextConfig, {"attention_dropout": 0.1}, "attention_dropout=0.1 is not supported"),
        (CLIPTextConfig, {"model_type": "t5"}, "model_type='t5' is not supported (allowed: 'clip_text_model')"),
        (CLIPTextConfig, {"num_attention_heads": 7}, "num_attention_heads=7 does not divide hidden_size=512"),
    ],
)  # fmt: skip
def test_what_we_would_compute_wrongly_is_an_error_naming_file_key_and_value(config, values, message):
    with pytest.raises(ValueError, match="^" + re.escape("some/config.json: " + message)):
        config.from_dict(values, "some/config.json")


def test_keys_that_are_off_or_notes_are_skipped():
    values = {"_class_name": "UNet2DConditionModel", "_diffusers_version": "9.9", "brand_new": None, "other_new": False}
    assert UNetConfig.from_dict(values) == UNetConfig()
    # Every block alike is the same as one value; and Flax's networks wrote how they computed.
    flax = {"only_cross_attention": [False] * 4, "split_head_dim": True, "dtype": "float32"}
    assert UNetConfig.from_dict(flax) == UNetConfig()
    assert CLIPTextConfig.from_dict({"architectures": ["FlaxCLIPTextModel"]}) == CLIPTextConfig()
    assert CLIPTextConfig.from_dict({"torch_dtype": "float32", "anything": 3}) == CLIPTextConfig()


def test_written_configurations_are_diffusers_and_transformers_own():
    import diffusers
    import transformers

    unet = UNetConfig(cross_attention_dim=768, upcast_attention=True, time_cond_proj_dim=256)
    written = json.loads(json.dumps(unet.to_dict()))
    assert UNetConfig.from_dict(written) == unet
    _, unused = diffusers.UNet2DConditionModel.extract_init_dict(written)[:2]
    assert not unused
    # Every key that diffusers has is a field or fixed: a default of theirs can never differ unseen.
    theirs = dict(diffusers.UNet2DConditionModel(block_out_channels=(32,) * 4).config)
    known = {f.name for f in dataclasses.fields(UNetConfig)} | set(UNetConfig.FIXED)
    assert {k for k in theirs if not k.startswith("_")} == known
    for key, allowed in UNetConfig.FIXED.items():
        assert theirs[key] in allowed, key
    assert dict(diffusers.AutoencoderKL().config).keys() >= {f.name for f in dataclasses.fields(VAEConfig)}
    clip = CLIPTextConfig(hidden_size=768, num_attention_heads=12, eos_token_id=2)
    assert CLIPTextConfig.from_dict(json.loads(json.dumps(clip.to_dict()))) == clip
    assert transformers.CLIPTextConfig(**clip.to_dict()).eos_token_id == 2


def test_defaults_are_diffusers_own():
    import diffusers

    theirs = dict(diffusers.UNet2DConditionModel.from_config({}).config)
    for field in dataclasses.fields(UNetConfig):
        assert theirs[field.name] == getattr(UNetConfig(), field.name), field.name
