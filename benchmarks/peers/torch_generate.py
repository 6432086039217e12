"""The peer of generate.py: PyTorch diffusers' pipelines, bfloat16 and torch.compile, as its guide to speed has them.

    python benchmarks/peers/torch_generate.py --model sd15 --batch 8
    python benchmarks/peers/torch_generate.py --model sdxl --batch 4 --mode max-autotune

Needs torch, diffusers, transformers and psutil; weights are random. UNet and decoder are channels_last and, unless
--mode eager, compiled; the attention is torch's own (SDPA). The tokenizer gets CLIP's vocabulary from this repository.
Prints one JSON line, its keys those of generate.py.
"""

import argparse
import importlib.metadata
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import diffusers
import psutil
import torch
import transformers

sys.path.insert(0, str(Path(__file__).parent.parent))
from architectures import ARCHITECTURES

from generate import BATCHES, PROMPT, RESOLUTIONS

VOCABULARY = Path(__file__).parents[2] / "src" / "maxdiff" / "weights" / "clip_vocabulary"
# Imports have taken their time by now; the kernel knows when the process began.
STARTED = psutil.Process().create_time()
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SCHEDULERS = {
    "euler": diffusers.EulerDiscreteScheduler,
    "ddim": diffusers.DDIMScheduler,
    "dpmpp_2m": diffusers.DPMSolverMultistepScheduler,
}


def make_pipeline(model: str, sampler: str) -> Any:
    """A random pipeline."""
    parts, xl = ARCHITECTURES[model], model == "sdxl"
    tokenizer = transformers.CLIPTokenizer(str(VOCABULARY / "vocab.json"), str(VOCABULARY / "merges.txt"), model_max_length=77,
                                           pad_token="<|endoftext|>")  # fmt: skip
    given: dict[str, Any] = {
        "unet": diffusers.UNet2DConditionModel(**parts["unet"]),
        "vae": diffusers.AutoencoderKL(**parts["vae"]),
        "text_encoder": transformers.CLIPTextModel(transformers.CLIPTextConfig(**parts["text_encoder"])),
        "tokenizer": tokenizer,
        "scheduler": SCHEDULERS[sampler](beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear"),
    }
    if xl:
        second = transformers.CLIPTextConfig(**{k: v for k, v in parts["text_encoder_2"].items() if k != "architectures"})
        given |= {"text_encoder_2": transformers.CLIPTextModelWithProjection(second), "tokenizer_2": tokenizer}
        pipeline = diffusers.StableDiffusionXLPipeline(**given)
    else:
        pipeline = diffusers.StableDiffusionPipeline(**given, safety_checker=None, feature_extractor=None,
                                                     requires_safety_checker=False)  # fmt: skip
    pipeline.set_progress_bar_config(disable=True)
    return pipeline.to(DEVICE, torch.bfloat16)


def main(argv: Sequence[str]) -> int:
    """Print a line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="sd15", choices=ARCHITECTURES)
    parser.add_argument("--resolution", type=int, default=0)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--sampler", default="euler", choices=SCHEDULERS)
    parser.add_argument("--mode", default="reduce-overhead", choices=["eager", "default", "reduce-overhead", "max-autotune"])
    args = parser.parse_args(argv)
    torch.set_float32_matmul_precision("high")
    pipeline = make_pipeline(args.model, args.sampler)
    pipeline.unet.to(memory_format=torch.channels_last)
    pipeline.vae.to(memory_format=torch.channels_last)
    if args.mode != "eager":
        pipeline.unet = torch.compile(pipeline.unet, mode=args.mode, fullgraph=True)
        pipeline.vae.decode = torch.compile(pipeline.vae.decode, mode=args.mode, fullgraph=True)
    side = args.resolution or RESOLUTIONS[args.model]

    def draw() -> float:
        begun = time.perf_counter()
        pipeline([PROMPT] * args.batch, num_inference_steps=args.steps, height=side, width=side, output_type="np")
        return time.perf_counter() - begun

    draw()
    first = time.time() - STARTED
    draw()
    seconds = [draw() for _ in range(BATCHES)]
    middle = statistics.median(seconds)
    peak = torch.cuda.max_memory_allocated() / 2**30 if DEVICE.type == "cuda" else None
    print(json.dumps({
        "system": "torch-diffusers", "model": args.model, "resolution": side, "batch": args.batch, "steps": args.steps,
        "sampler": args.sampler, "mode": args.mode, "device": torch.cuda.get_device_name() if peak else "cpu",
        **{name: importlib.metadata.version(name) for name in ("torch", "diffusers", "transformers")},
        "date": time.strftime("%Y-%m-%d"), "first_s": round(first, 1),
        "images_per_s": float(f"{args.batch / middle:.4g}"), "batch_s": round(middle, 3),
        "batch_s_min": round(min(seconds), 3), "batch_s_max": round(max(seconds), 3), "peak_gib": peak and round(peak, 2),
    }), flush=True)  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
