"""The peers of input_pipeline.py: webdataset and Hugging Face datasets, with PyTorch's loader, as their documentation has them.

The transforms are those of diffusers' train_text_to_image.py: RGB, Resize with LANCZOS, RandomCrop, RandomHorizontalFlip,
ToTensor and Normalize (or, without floats, PILToTensor), and transformers' CLIPTokenizer on all captions of a batch.
"""

import atexit
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from input_pipeline import IMAGES, tars_of
from torchvision import transforms

VOCABULARY = Path(__file__).parents[2] / "src" / "maxdiff" / "weights" / "clip_vocabulary"


def make_transform(resolution: int, floats: bool) -> Callable[[Any], torch.Tensor]:
    """From a PIL image to what is trained on: float32 in -1..1, or uint8, [3 resolution resolution]."""
    last = [transforms.ToTensor(), transforms.Normalize([0.5], [0.5])] if floats else [transforms.PILToTensor()]
    return transforms.Compose([
        transforms.Resize(resolution, interpolation=transforms.InterpolationMode.LANCZOS),
        transforms.RandomCrop(resolution),
        transforms.RandomHorizontalFlip(),
        *last,
    ])  # fmt: skip


def make_tokenize() -> Callable[[Sequence[str]], torch.Tensor]:
    """From captions to ids, int64 [b 77]."""
    tokenizer = transformers.CLIPTokenizer(str(VOCABULARY / "vocab.json"), str(VOCABULARY / "merges.txt"), model_max_length=77,
                                           pad_token="<|endoftext|>")  # fmt: skip
    options = {"max_length": 77, "padding": "max_length", "truncation": True, "return_tensors": "pt"}
    return lambda texts: tokenizer(list(texts), **options).input_ids


def webdataset_batches(data: str, resolution: int, batch: int, workers: int, floats: bool) -> Iterator[dict[str, Any]]:
    """Endless batches by webdataset: shards resampled by each worker, as its documentation has it for training."""
    import webdataset

    transform, tokenize = make_transform(resolution, floats), make_tokenize()

    def collate(examples: Sequence[tuple[torch.Tensor, str]]) -> dict[str, Any]:
        pixels, texts = zip(*examples, strict=True)
        return {"pixel_values": torch.stack(pixels), "input_ids": tokenize(texts)}

    dataset = (
        webdataset.WebDataset(tars_of(data), resampled=True, shardshuffle=False)
        .shuffle(100)
        .decode("pilrgb")
        .to_tuple(";".join(IMAGES), "txt")
        .map_tuple(transform, str)
        .batched(batch, collation_fn=collate)
    )
    yield from webdataset.WebLoader(dataset, batch_size=None, num_workers=workers)


def datasets_batches(data: str, resolution: int, batch: int, workers: int, floats: bool) -> Iterator[dict[str, Any]]:
    """Endless batches by Hugging Face datasets: its `webdataset` builder, with_transform, and PyTorch's DataLoader."""
    import datasets

    datasets.disable_progress_bars()
    transform, tokenize = make_transform(resolution, floats), make_tokenize()
    cache = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, cache, ignore_errors=True)
    dataset = datasets.load_dataset("webdataset", data_files={"train": tars_of(data)}, split="train", cache_dir=cache)
    column = next(name for name in dataset.column_names if name in IMAGES)

    def preprocess(examples: dict[str, Any]) -> dict[str, Any]:
        examples["pixel_values"] = [transform(image.convert("RGB")) for image in examples[column]]
        examples["input_ids"] = tokenize(examples["txt"])
        return examples

    def collate(examples: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return {key: torch.stack([example[key] for example in examples]) for key in ("pixel_values", "input_ids")}

    loader = torch.utils.data.DataLoader(dataset.with_transform(preprocess), batch_size=batch, shuffle=True, drop_last=True,
                                         num_workers=workers, persistent_workers=workers > 0, collate_fn=collate)  # fmt: skip
    while True:
        yield from loader


SYSTEMS = {"webdataset": webdataset_batches, "datasets": datasets_batches}
