"""Tars of emoji, read and written: what the scripts of this folder share."""

import hashlib
import io
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from glob import glob
from pathlib import Path

from PIL import Image

TRAIN = str(Path(__file__).parent / "emoji" / "train-*.tar")
KINDS = {"webp", "txt", "json"}
NONE = "holds no tars of .webp, .txt and .json"  # what is said of a glob without any

Files = dict[str, bytes]


def examples(pattern: str) -> Iterator[tuple[str, Files]]:
    """(key, its files by their endings) of each example of the tars, whose members stand together; of others nothing."""
    for path in sorted(glob(pattern)):
        with tarfile.open(path) as tar:
            last, files = "", Files()
            for member in tar:
                key, _, kind = member.name.partition(".")
                last, files = key, files if key == last else Files()
                files[kind] = tar.extractfile(member).read()  # pyright: ignore[reportOptionalMemberAccess]
                if files.keys() == KINDS:
                    yield key, files


def write_shards(folder: Path, name: str, made: Sequence[tuple[str, Mapping[str, bytes]]], shard_examples: int) -> None:
    """Tars of (key, files), in the place of those that are there; the same bytes whenever and by whomever they are written."""
    for path in folder.glob(f"{name}-*.tar*"):
        path.unlink()
    for shard, start in enumerate(range(0, len(made), shard_examples)):
        path, some = folder / f"{name}-{shard:06d}.tar", made[start : start + shard_examples]
        with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
            for key, files in some:
                for kind, payload in files.items():
                    info = tarfile.TarInfo(f"{key}.{kind}")
                    info.size = len(payload)
                    tar.addfile(info, io.BytesIO(payload))
        print(f"{path}: {len(some)} examples, {path.stat().st_size:,} bytes")


def opened(files: Mapping[str, bytes]) -> Image.Image:
    """An example's picture."""
    return Image.open(io.BytesIO(files["webp"]))


def on_white(rgba: Image.Image) -> Image.Image:
    """The picture as it is trained on."""
    white = Image.new("RGBA", rgba.size, "white")
    white.alpha_composite(rgba)
    return white.convert("RGB")


def webp(image: Image.Image, quality: int, method: int) -> bytes:
    """The picture as a file, lossy."""
    file = io.BytesIO()
    image.save(file, "WEBP", quality=quality, method=method)
    return file.getvalue()


def hash_of(text: str) -> int:
    """A number that is always the same."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def is_one_in(count: int, text: str) -> bool:
    """Whether this text is one of so many, by a hash."""
    return hash_of(text) % count == 0
