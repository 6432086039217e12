"""The peer of train_step.py: PyTorch diffusers' training step, the way its users run it, on one device.

    python benchmarks/peers/torch_train_step.py --model sd15 sd2 --batch 16                   all that our step does
    python benchmarks/peers/torch_train_step.py --model sd2 --pipeline unet --batch 32 --modes compile

Needs torch, diffusers and transformers, and nothing of ours. Weights are random.
  * --pipeline full: from uint8 images and token ids to the update, as train_step.py; autoencoder and text encoder are
    bfloat16 and without gradients, as in diffusers' train_text_to_image.py.
  * --pipeline unet: from latents and text states, as where these are cached.

Then noise, UNet under bfloat16 autocast with float32 weights, mean square error, backward, clipping and fused AdamW; the
average of weights only with --ema (train_step.py: use_ema=false leaves ours out). NHWC, TF32 and cuDNN's search are on.
Prints one JSON line per case, its keys those of train_step.py where they mean the same; warm_up_s is of the first four
steps, compilation included.
"""

import argparse
import gc
import importlib.metadata
import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL, UNet2DConditionModel
from transformers import CLIPTextConfig, CLIPTextModel

sys.path.insert(0, str(Path(__file__).parent.parent))
from architectures import ARCHITECTURES

UNETS = {model: parts["unet"] for model, parts in ARCHITECTURES.items()}
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
WARM_UP, WINDOWS = 4, 5


def encoder(model: str, resolution: int, batch: int) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    """A function that encodes a batch of images and token ids, on the device already: (latents, text states)."""
    parts = ARCHITECTURES[model]
    vae = AutoencoderKL(**parts["vae"]).requires_grad_(False).eval()
    vae = vae.to(DEVICE, torch.bfloat16).to(memory_format=torch.channels_last)
    text = CLIPTextModel(CLIPTextConfig(**parts["text_encoder"])).requires_grad_(False).eval().to(DEVICE, torch.bfloat16)
    images = torch.randint(0, 256, (batch, resolution, resolution, 3), dtype=torch.uint8, device=DEVICE)
    ids = torch.randint(0, text.config.vocab_size, (batch, 77), device=DEVICE)

    @torch.no_grad()
    def encode() -> tuple[torch.Tensor, torch.Tensor]:
        # An NHWC batch seen as NCHW is what torch calls channels_last: nothing is copied.
        pixels = (images.to(torch.bfloat16) / 127.5 - 1).permute(0, 3, 1, 2)
        latents = vae.encode(pixels).latent_dist.sample() * vae.config.scaling_factor
        return latents.float(), text(ids, return_dict=False)[0]

    return encode


def cached(model: str, resolution: int, batch: int) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    """A function that returns random latents and text states."""
    side = resolution // 8
    latents = torch.randn(batch, 4, side, side, device=DEVICE).to(memory_format=torch.channels_last)
    states = torch.randn(batch, 77, UNETS[model]["cross_attention_dim"], device=DEVICE)
    return lambda: (latents, states)


def added_conditioning(model: str, resolution: int, batch: int) -> dict[str, torch.Tensor] | None:
    """SDXL's pooled text and sizes; None for the others."""
    if model != "sdxl":
        return None
    sizes = [float(x) for x in (resolution, resolution, 0, 0, resolution, resolution)]
    return {
        "text_embeds": torch.randn(batch, 1280, device=DEVICE),
        "time_ids": torch.tensor([sizes] * batch, device=DEVICE),
    }


def make_step(model: str, resolution: int, batch: int, mode: str, args: argparse.Namespace) -> Callable[[], torch.Tensor]:
    """A function that makes one step and returns its loss."""
    unet = UNet2DConditionModel(**UNETS[model]).to(DEVICE, torch.bfloat16 if args.master == "bf16" else torch.float32)
    unet = unet.train().to(memory_format=torch.channels_last)
    if args.remat:
        unet.enable_gradient_checkpointing()
    params = list(unet.parameters())
    average = [p.detach().clone() for p in params] if args.ema else None
    optimizer = torch.optim.AdamW(params, lr=1e-5, fused=True)
    alphas = torch.cumprod(1 - torch.linspace(0.00085**0.5, 0.012**0.5, 1000) ** 2, 0).to(DEVICE)
    inputs = (encoder if args.pipeline == "full" else cached)(model, resolution, batch)
    added = added_conditioning(model, resolution, batch)

    def loss_of(latents: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        t = torch.randint(0, 1000, (batch,), device=DEVICE)
        noise = torch.randn_like(latents)
        alpha = alphas[t].view(-1, 1, 1, 1)
        noisy = alpha.sqrt() * latents + (1 - alpha).sqrt() * noise
        with torch.autocast(DEVICE.type, torch.bfloat16):
            prediction = unet(noisy, t, states, added_cond_kwargs=added, return_dict=False)[0]
        return F.mse_loss(prediction.float(), noise)

    if mode == "compile":
        loss_of = torch.compile(loss_of)
        inputs = torch.compile(inputs) if args.pipeline == "full" else inputs

    def step() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(*inputs())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        if average is not None:
            torch._foreach_lerp_(average, [p.detach() for p in params], 1e-4)
        return loss.detach()

    return step


def synchronize() -> None:
    """Wait for the device."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def seconds_of(function: Callable[[], Any], repeats: int) -> float:
    """The average time of a call, of several sent off at once."""
    started = time.perf_counter()
    for _ in range(repeats):
        function()
    synchronize()
    return (time.perf_counter() - started) / repeats


def measure(model: str, resolution: int, batch: int, mode: str, args: argparse.Namespace) -> dict[str, Any]:
    """One case's figures."""
    torch.manual_seed(0)
    step = make_step(model, resolution, batch, mode, args)
    started = time.perf_counter()
    first = step().item()
    seconds_of(step, WARM_UP - 1)
    warm_up = time.perf_counter() - started
    cuda = DEVICE.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    window = math.ceil(args.steps / WINDOWS)
    rows = [1e3 * seconds_of(step, window) for _ in range(math.ceil(args.steps / window))]
    ms = statistics.median(rows)
    return {
        "warm_up_s": round(warm_up, 1),
        "steps": args.steps,
        "step_ms": round(ms, 2),
        "step_ms_min": round(min(rows), 2),
        "step_ms_max": round(max(rows), 2),
        "images_per_s": float(f"{batch / ms * 1e3:.4g}"),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if cuda else None,
        "loss": round(first, 4),
        "last_loss": round(step().item(), 4),
    }


def main(argv: Sequence[str]) -> int:
    """Print a line for each case; 1 if one did not fit into memory."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=["sd15"], choices=UNETS)
    parser.add_argument("--pipeline", default="full", choices=["full", "unet"])
    parser.add_argument("--resolution", nargs="+", type=int, default=[512], help="side of the images, pixels")
    parser.add_argument("--batch", nargs="+", type=int, default=[16])
    parser.add_argument("--modes", nargs="+", default=["eager", "compile"], choices=["eager", "compile"])
    parser.add_argument("--steps", type=int, default=20, help="steps timed, in windows of a fifth of them")
    parser.add_argument("--remat", action="store_true", help="gradient checkpointing")
    parser.add_argument("--ema", action="store_true", help="keep a moving average of the weights")
    parser.add_argument("--master", default="fp32", choices=["fp32", "bf16"], help="dtype of the UNet's weights and moments")
    args = parser.parse_args(argv)
    if args.pipeline == "full" and "sdxl" in args.model:
        parser.error("--model sdxl is for --pipeline unet alone")
    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.matmul.allow_tf32 = True
    versions = {name: importlib.metadata.version(name) for name in ("torch", "diffusers", "transformers")}
    device = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "cpu"
    failed = False
    for model, resolution, mode, batch in itertools.product(args.model, args.resolution, args.modes, args.batch):
        case = {"system": "torch-diffusers", "model": model, "pipeline": args.pipeline, "resolution": resolution,
                "batch": batch, "mode": mode, "remat": "full" if args.remat else "none", "ema": args.ema, "master": args.master,
                "device": device, "devices": 1, **versions, "date": time.strftime("%Y-%m-%d")}  # fmt: skip
        torch._dynamo.reset()
        try:
            result = measure(model, resolution, batch, mode, args)
        except torch.OutOfMemoryError:
            result, failed = {"error": "out of memory"}, True
        print(json.dumps({**case, **result}), flush=True)
        gc.collect()  # what the case held
        if DEVICE.type == "cuda":
            torch.cuda.empty_cache()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
