"""Eight CPU devices, strict JAX, and tiny pipelines that diffusers itself has written."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
# Eight devices on fewer cores wait for each other's threads otherwise.
os.environ.setdefault("PJRT_NPROC", "16")
# Most of the tests' time is LLVM's, for programs that run for less than they were compiled. Processes that tests start
# inherit it: what is compared bit for bit is compiled alike.
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"

import shutil
from pathlib import Path
from typing import Any

import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

DOWN, CROSS_DOWN, UP, CROSS_UP = "DownBlock2D", "CrossAttnDownBlock2D", "UpBlock2D", "CrossAttnUpBlock2D"
UNET = {"block_out_channels": (32, 64), "layers_per_block": 1, "cross_attention_dim": 64, "sample_size": 64,
        "down_block_types": (CROSS_DOWN, DOWN), "up_block_types": (UP, CROSS_UP)}  # fmt: skip
UNETS: dict[str, dict[str, Any]] = {
    "sd1": {**UNET, "attention_head_dim": 8},
    "inpaint": {**UNET, "attention_head_dim": 8, "in_channels": 9},
    "sd2": {**UNET, "attention_head_dim": (1, 1), "use_linear_projection": True},
    "sdxl": {**UNET, "attention_head_dim": (1, 1), "use_linear_projection": True, "transformer_layers_per_block": (1, 2),
             "cross_attention_dim": 192, "sample_size": 128, "down_block_types": (DOWN, CROSS_DOWN), "up_block_types": (CROSS_UP, UP),
             "addition_embed_type": "text_time", "addition_time_embed_dim": 256,
             "projection_class_embeddings_input_dim": 128 + 6 * 256},
}  # fmt: skip
VAE = {"block_out_channels": (32, 32), "layers_per_block": 1, "down_block_types": ("DownEncoderBlock2D",) * 2,
       "up_block_types": ("UpDecoderBlock2D",) * 2, "sample_size": 512}  # fmt: skip
TEXT = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 1, "projection_dim": 64}
TEXT_2 = {"hidden_size": 128, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 2, "projection_dim": 128}


def make_pipeline(kind: str, scratch: Path) -> Any:
    """A random diffusers pipeline, small but in every other way like `kind`."""
    import diffusers
    import torch
    import transformers

    from maxdiff.weights.tokenizer import END, published_tokenizer

    def tokenizer(pad: str) -> Any:
        folder = scratch / f"pad-{len(pad)}"
        published_tokenizer(pad).save(folder)
        return transformers.CLIPTokenizer.from_pretrained(folder)

    torch.manual_seed(0)
    act = "gelu" if kind == "sd2" else "quick_gelu"
    parts: dict[str, Any] = {
        "unet": diffusers.UNet2DConditionModel(**UNETS[kind]),
        "vae": diffusers.AutoencoderKL(**VAE, **({"scaling_factor": 0.13025} if kind == "sdxl" else {"force_upcast": False})),
        "text_encoder": transformers.CLIPTextModel(transformers.CLIPTextConfig(**TEXT, hidden_act=act)),
        "tokenizer": tokenizer("!" if kind == "sd2" else END),
        "scheduler": diffusers.DDIMScheduler(
            beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", clip_sample=False,
            set_alpha_to_one=False, steps_offset=1, prediction_type="v_prediction" if kind == "sd2" else "epsilon",
        ),
    }  # fmt: skip
    if kind == "sdxl":
        parts["text_encoder_2"] = transformers.CLIPTextModelWithProjection(
            transformers.CLIPTextConfig(**TEXT_2, hidden_act="gelu")
        )
        parts["tokenizer_2"] = tokenizer("!")
        return diffusers.StableDiffusionXLPipeline(**parts)
    cls = diffusers.StableDiffusionInpaintPipeline if kind == "inpaint" else diffusers.StableDiffusionPipeline
    return cls(**parts, safety_checker=None, feature_extractor=None, requires_safety_checker=False)


# With several workers these come first, the longest before the others: none of them is left for one worker at the end.
LONGEST = ("test_crashes.py", "test_processes.py", "test_aot.py", "test_bucket.py", "test_flash.py", "test_runs.py", "test_gradients.py", "test_generate.py", "test_buckets.py",
           "test_encode.py", "test_health.py", "test_step.py", "test_keys.py", "test_parity.py", "test_attention.py",
           "test_benchmark_train_step.py", "test_sharded_update.py", "test_draw.py", "test_batches.py")  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]):
    rank = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path.name, len(rank)))


@pytest.fixture(scope="session")
def diffusers_pipelines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Path]]:
    """kind -> (diffusers' pipeline, the folder that it wrote)."""
    root = tmp_path_factory.mktemp("pipelines")
    result = {}
    for kind in UNETS:
        pipeline = make_pipeline(kind, root)
        pipeline.save_pretrained(root / kind)
        result[kind] = (pipeline, root / kind)
    return result


@pytest.fixture(scope="session")
def folders(diffusers_pipelines: dict[str, tuple[Any, Path]]) -> dict[str, Path]:
    """kind -> a diffusers folder."""
    return {kind: folder for kind, (_, folder) in diffusers_pipelines.items()}


@pytest.fixture(scope="session")
def one_level(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A diffusers folder like SD1's whose UNet has one level, and attention in its middle, which compiles in a third of the time."""
    import diffusers

    folder = tmp_path_factory.mktemp("one_level") / "pipeline"
    shutil.copytree(folders["sd1"], folder)
    levels = {"block_out_channels": (32,), "down_block_types": (DOWN,), "up_block_types": (UP,)}
    diffusers.UNet2DConditionModel(**{**UNETS["sd1"], **levels}).save_pretrained(folder / "unet")
    return folder


@pytest.fixture(scope="session", autouse=True)
def _compiled_once(tmp_path_factory: pytest.TempPathFactory):
    """Programs compiled by one test serve the others, of every worker."""
    mine = tmp_path_factory.getbasetemp()
    everyones = mine.parent if "PYTEST_XDIST_WORKER" in os.environ else mine
    jax.config.update("jax_compilation_cache_dir", str(everyones / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
