"""Make the shards of data/emoji from the original ones: 128 pixels, on white, some of them held out.

    python data/make_emoji.py FOLDER_OF_ORIGINALS data/emoji

The originals are WebDataset tars of 256-pixel RGBA WebP files, each with its label in a .txt and what emojibase says of it in
a .json: Microsoft's Fluent 3D emoji (npm @lobehub/fluent-emoji-3d), emojibase's labels. The output depends on them and on the
version of libwebp alone. They are stored on white, as they are trained on: the alpha channels would take as many bytes again as
the colours.
"""

import argparse
import hashlib
import io
import json
import tarfile
from collections.abc import Iterable
from pathlib import Path

from emoji_captions import captions
from PIL import Image

PIXELS = 128
QUALITY = 75
SHARD_EXAMPLES = 1100
# One family in 20 is held out.
HELD_OUT = 20
SKIN_TONES = {f"1f3f{digit}" for digit in "bcdef"}


def examples(folder: Path) -> dict[str, dict[str, bytes]]:
    """key -> its files, by their endings; ordered by key."""
    found: dict[str, dict[str, bytes]] = {}
    for path in sorted(folder.glob("*.tar")):
        with tarfile.open(path) as tar:
            for member in tar:
                key, _, kind = member.name.partition(".")
                found.setdefault(key, {})[kind] = tar.extractfile(member).read()  # pyright: ignore[reportOptionalMemberAccess]
    return {key: parts for key, parts in sorted(found.items()) if parts.keys() >= {"webp", "txt", "json"}}


def made(parts: dict[str, bytes]) -> dict[str, bytes]:
    """The files of an example: its picture, its label, and more captions as the fields of a .json."""
    rgba = Image.open(io.BytesIO(parts["webp"])).convert("RGBA")
    said = json.dumps(captions(rgba, json.loads(parts["json"])), ensure_ascii=False)
    return {"webp": shrink(rgba), "txt": parts["txt"], "json": said.encode()}


def shrink(rgba: Image.Image) -> bytes:
    """The image on white at PIXELS x PIXELS, as lossy WebP."""
    white = Image.new("RGBA", rgba.size, "white")
    white.alpha_composite(rgba)
    file = io.BytesIO()
    white.convert("RGB").resize((PIXELS, PIXELS), Image.Resampling.LANCZOS).save(file, "WEBP", quality=QUALITY, method=6)
    return file.getvalue()


def held_out(key: str) -> bool:
    """Whether the emoji is held out: by a hash of its key less skin tones, so that its variants stay together."""
    family = "-".join(part for part in key.split("-") if part not in SKIN_TONES)
    return int.from_bytes(hashlib.sha256(family.encode()).digest()[:8], "big") % HELD_OUT == 0


def write_shard(path: Path, keys: Iterable[str], found: dict[str, dict[str, bytes]]) -> None:
    """One tar, the same bytes whenever and by whomever it is written."""
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for key in keys:
            for kind, payload in made(found[key]).items():
                info = tarfile.TarInfo(f"{key}.{kind}")
                info.size = len(payload)
                tar.addfile(info, io.BytesIO(payload))


def main() -> None:
    """Write the shards named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("originals", type=Path, help="folder with the original tars")
    parser.add_argument("output", type=Path, help="folder for the new ones")
    arguments = parser.parse_args()
    found = examples(arguments.originals)
    if not found:
        parser.error(f"originals={arguments.originals} holds no tars of .webp, .txt and .json")
    arguments.output.mkdir(parents=True, exist_ok=True)
    for split, wanted in (("train", False), ("heldout", True)):
        keys = [key for key in found if held_out(key) is wanted]
        for shard, start in enumerate(range(0, len(keys), SHARD_EXAMPLES)):
            path = arguments.output / f"{split}-{shard:06d}.tar"
            write_shard(path, keys[start : start + SHARD_EXAMPLES], found)
            print(f"{path}: {len(keys[start : start + SHARD_EXAMPLES])} examples, {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
