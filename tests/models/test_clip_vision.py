"""CLIP's two encoders beside transformers' CLIPModel: embeddings, pixels, configurations, files."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
import transformers

from maxdiff.features import clip, clip_pixels
from maxdiff.models.clip import CLIPTextModel, CLIPVisionModel
from maxdiff.models.network import Network
from maxdiff.weights.features import clip_configs, load_clip
from maxdiff.weights.tensors import open_tensors, write_safetensors
from maxdiff.weights.tokenizer import published_tokenizer
from tests.models.make_inception_features import random_images

SMALL_TEXT = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
SMALL_VISION = {**SMALL_TEXT, "hidden_size": 64, "num_attention_heads": 4, "image_size": 60, "patch_size": 16}
TEXTS = ["a red heart", "two cats on a sofa, oil on canvas " * 20]


def make_clip(folder: Path, act: str = "quick_gelu", **text: Any) -> Any:
    """A random CLIPModel, written to the folder."""
    torch.manual_seed(0)
    config = transformers.CLIPConfig(
        text_config={**SMALL_TEXT, "hidden_act": act, **text},
        vision_config={**SMALL_VISION, "hidden_act": act},
        projection_dim=24,
    )
    model = transformers.CLIPModel(config).eval()
    with torch.no_grad():  # norms and biases that matter
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize(("act", "text"), [("quick_gelu", {"eos_token_id": 2}), ("gelu", {"eos_token_id": 49407})])
def test_embeddings_equal_transformers(act: str, text: dict, tmp_path: Path):
    model, images = make_clip(tmp_path, act, **text), random_images(97, 131)
    ours = clip(tmp_path)
    assert ours.dim == 24
    with torch.no_grad():
        pixels = torch.from_numpy(clip_pixels(images, 60).transpose(0, 3, 1, 2).copy())
        ids = torch.from_numpy(published_tokenizer()(TEXTS)).long()
        theirs = [model.get_image_features(pixels).pooler_output, model.get_text_features(ids).pooler_output]
    for found, expected in zip((ours.images(images), ours.texts(TEXTS)), theirs, strict=True):
        expected = torch.nn.functional.normalize(expected, dim=-1).numpy()
        assert found.shape == expected.shape == (2, 24)
        assert found.dtype == np.float32
        np.testing.assert_allclose(np.linalg.norm(found, axis=-1), 1, rtol=1e-6)
        assert np.linalg.norm(found - expected) / np.linalg.norm(expected) < 1e-5
        assert np.linalg.norm(found[0] - found[1]) > 0.01  # else nothing is shown


@pytest.mark.parametrize("size", [(97, 131), (301, 224), (224, 224), (640, 257)])
def test_pixels_equal_the_processors(size: tuple[int, int]):
    images = random_images(*size)
    processor = transformers.CLIPImageProcessorPil()
    theirs = processor(list(images), return_tensors="np")["pixel_values"].transpose(0, 2, 3, 1)
    ours = clip_pixels(images, 224)
    assert ours.shape == (2, 224, 224, 3)
    np.testing.assert_allclose(ours, theirs, atol=1e-6)


def vision(hidden: int, layers: int, heads: int, patch: int, **more: Any) -> dict[str, Any]:
    return {"hidden_size": hidden, "intermediate_size": 4 * hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
            "patch_size": patch, **more}  # fmt: skip


def text(hidden: int, layers: int, **more: Any) -> dict[str, Any]:
    return {"hidden_size": hidden, "intermediate_size": 4 * hidden, "num_hidden_layers": layers,
            "num_attention_heads": hidden // 64, **more}  # fmt: skip


GELU = {"hidden_act": "gelu"}


# Of the published models, the number of parameters less one, the temperature.
@pytest.mark.parametrize(
    ("config", "count"),
    [
        ({"vision_config": vision(768, 12, 12, 32), "text_config": text(512, 12), "projection_dim": 512}, 151_277_312),
        ({"vision_config": vision(768, 12, 12, 16), "text_config": text(512, 12), "projection_dim": 512}, 149_620_736),
        # Older files say it twice, and the second time counts.
        (
            {
                "vision_config": {}, "vision_config_dict": vision(1024, 24, 16, 14),
                "text_config": text(512, 3), "text_config_dict": text(768, 12), "projection_dim": 768,
            },
            427_616_512,
        ),
        (
            {"vision_config": vision(1280, 32, 16, 14, **GELU), "text_config": text(1024, 24, **GELU), "projection_dim": 1024},
            986_109_440,
        ),
    ],
    ids=["ViT-B/32", "ViT-B/16", "ViT-L/14", "ViT-H/14"],
)  # fmt: skip
def test_published_models(config: dict, count: int):
    image_config, text_config = clip_configs({"model_type": "clip", **config}, "config.json")
    theirs = transformers.CLIPConfig(**config)
    for ours, other in ((image_config, theirs.vision_config), (text_config, theirs.text_config)):
        keys = {field.name for field in dataclasses.fields(ours)} - {"projection_dim", "architectures"}
        assert {key: getattr(ours, key) for key in keys} == {key: getattr(other, key) for key in keys}
    images, texts = Network(CLIPVisionModel, image_config), Network(CLIPTextModel, text_config)
    assert images.num_parameters() + texts.num_parameters() == count
    pixels = jax.ShapeDtypeStruct((2, 224, 224, 3), np.float32)
    assert jax.eval_shape(images.apply, images.abstract(), pixels).shape == (2, config["projection_dim"])
    ids = jax.ShapeDtypeStruct((3, 77), np.int32)
    assert jax.eval_shape(texts.apply, texts.abstract(), ids).text_embeds.shape == (3, config["projection_dim"])


def test_what_does_not_fit_is_named(tmp_path: Path):
    make_clip(tmp_path)
    config, weights = tmp_path / "config.json", tmp_path / "model.safetensors"
    values, tensors = json.loads(config.read_text()), open_tensors(weights)

    def changed(**change: Any) -> Path:
        config.write_text(json.dumps({**values, **change}))
        return tmp_path

    with pytest.raises(ValueError, match=r"config.json: model_type='siglip' is not supported \(allowed: 'clip'\)"):
        load_clip(changed(model_type="siglip"))
    with pytest.raises(ValueError, match=r"config.json: vision_config: num_channels=4 is not supported \(allowed: 3\)"):
        load_clip(changed(vision_config={**values["vision_config"], "num_channels": 4}))
    with pytest.raises(ValueError, match=r"vision_config: patch_size=64 is more than image_size=60"):
        load_clip(changed(vision_config={**values["vision_config"], "patch_size": 64}))
    with pytest.raises(
        ValueError, match=r"model.safetensors: 1 tensors do not fit: visual_projection.weight has shape \(24, 64\)"
    ):
        load_clip(changed(projection_dim=23))
    changed()
    processor = tmp_path / "preprocessor_config.json"
    processor.write_text(json.dumps({"crop_size": {"height": 224, "width": 224}}))
    with pytest.raises(ValueError, match=r"preprocessor_config.json: crop_size=.* is not supported \(allowed: .*60"):
        load_clip(tmp_path)
    processor.write_text(json.dumps({"size": 60, "image_mean": [0.5, 0.5, 0.5], "image_std": [0.25, 0.25, 0.25]}))
    assert (load_clip(tmp_path).mean, load_clip(tmp_path).std) == ((0.5, 0.5, 0.5), (0.25, 0.25, 0.25))
    rest = {key: tensor for key, tensor in tensors.items() if key != "visual_projection.weight"}
    write_safetensors(weights, [*rest.items(), ("other", rest["logit_scale"])], {})
    with pytest.raises(
        ValueError, match=r"1 keys are missing: visual_projection.weight; 1 keys have no place in this network: other"
    ):
        load_clip(tmp_path)
