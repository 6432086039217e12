"""What generate.py is to draw: prompts from the command line or a file, each image with its seed and its file's name."""

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from maxdiff.config import Sampling
from maxdiff.draw import check_seed

# What a line of a JSONL file may say.
FIELDS = {"prompt": str, "negative_prompt": str, "seed": int, "image": str, "mask": str}


@dataclasses.dataclass(frozen=True)
class Wanted:
    """One image to be drawn.

    Attributes:
        prompt, negative_prompt: texts.
        seed: decides its noise, whatever else is drawn; below 2^32.
        image, mask: files that it begins with; "" for none.
        file: the name that it gets.
    """

    prompt: str
    negative_prompt: str
    seed: int
    image: str
    mask: str
    file: str


def wanted(sampling: Sampling, seed: int) -> list[Wanted]:
    """Every image that a configuration asks for: num_images_per_prompt of each prompt.

    Image i of all has seed + i, unless its line of a JSONL file or `seeds` says otherwise; the k-th of a line with a
    seed has that seed + k.

    Raises:
        ValueError, OSError: naming key, value and what is allowed; for a file without prompts or with a wrong line.
    """
    lines, each = list(_lines(sampling)), sampling.num_images_per_prompt
    if sampling.seeds and len(sampling.seeds) != len(lines) * each:
        raise ValueError(f"seeds has {len(sampling.seeds)} numbers for {len(lines)} prompts with num_images_per_prompt={each}; "
                         f"allowed: {len(lines) * each} of them, or none")  # fmt: skip
    result = []
    for number, line in enumerate(lines):
        for k in range(each):
            i = number * each + k
            own = line["seed"] + k if "seed" in line else seed + i
            own = sampling.seeds[i] if sampling.seeds else own
            check_seed(own)
            prefix = f"{number:05d}-" if len(lines) > 1 else ""
            result.append(Wanted(
                prompt=line["prompt"], negative_prompt=line.get("negative_prompt", sampling.negative_prompt), seed=own,
                image=line.get("image", sampling.image), mask=line.get("mask", sampling.mask),
                file=f"{prefix}{slug(line['prompt'])}-{own}.png",
            ))  # fmt: skip
    return result


def slug(prompt: str) -> str:
    """A file's name from a prompt."""
    kept = "".join(c if c.isalnum() else "-" for c in prompt.lower())
    short = "-".join(filter(None, kept.split("-")))[:60]
    # File systems count bytes, and allow 255.
    return short.encode()[:180].decode(errors="ignore").rstrip("-") or "image"


def _lines(sampling: Sampling) -> Iterator[dict[str, Any]]:
    given = {key: getattr(sampling, key) for key in ("prompt", "prompts", "prompts_file")}
    named = [key for key, value in given.items() if value]
    if len(named) != 1:
        raise ValueError(f"{' and '.join(named) or 'no prompt'} given; allowed: one of prompt, prompts and prompts_file")
    if sampling.prompts_file:
        yield from _file(Path(sampling.prompts_file))
    else:
        yield from ({"prompt": prompt} for prompt in sampling.prompts or [sampling.prompt])


def _file(path: Path) -> Sequence[dict[str, Any]]:
    """The lines of a file: a prompt each, or, of a .jsonl, an object each; empty ones are passed over."""
    if path.suffix == ".json":
        raise ValueError(f"prompts_file={str(path)!r} is not supported; allowed: .jsonl, an object on each line, or .txt")
    try:
        # Not splitlines(), which also splits where JSON may go on.
        texts = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"prompts_file={str(path)!r} cannot be read: {error}") from None
    numbered = [(number, text.strip()) for number, text in enumerate(texts, 1) if text.strip()]
    if not numbered:
        raise ValueError(f"prompts_file={str(path)!r} has no prompt")
    if path.suffix != ".jsonl":
        return [{"prompt": text} for _, text in numbered]
    return [_object(text, f"prompts_file: {path}, line {number}") for number, text in numbered]


def _object(text: str, where: str) -> dict[str, Any]:
    try:
        line = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{where} is no JSON: {error}") from None
    if not isinstance(line, dict) or "prompt" not in line:
        raise ValueError(f"{where} is no object with a prompt")
    for key, value in line.items():
        if key not in FIELDS:
            raise ValueError(f"{where}: there is no {key!r} (allowed: {', '.join(FIELDS)})")
        if not isinstance(value, FIELDS[key]) or isinstance(value, bool):
            raise ValueError(f"{where}: {key}={value!r} has the wrong type (allowed: {FIELDS[key].__name__})")
        if isinstance(value, str) and not value.isascii() and value != value.encode(errors="replace").decode():
            raise ValueError(f"{where}: {key}={value!r} is no text: it has half of a character")
    return line
