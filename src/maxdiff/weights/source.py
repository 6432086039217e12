"""Where a model comes from: a local folder, a single file, or a repository on the Hugging Face hub."""

import dataclasses
import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from maxdiff.weights.tensors import SUFFIXES, Tensors, open_tensors

logger = logging.getLogger(__name__)

FromPt = Literal["auto"] | bool

# Stems of weight files, diffusers' and transformers', in PyTorch's and in Flax's spelling.
TORCH_STEMS = ("diffusion_pytorch_model", "model", "pytorch_model")
FLAX_FILES = ("diffusion_flax_model.msgpack", "flax_model.msgpack")

HUB_TIMEOUT_SECONDS = 20.0


@dataclasses.dataclass(frozen=True)
class Source:
    """A folder of files that may not be here yet.

    Attributes:
        name: the path or id that the user gave, for messages.
        files: what the folder holds, as relative paths with forward slashes.
        fetch: makes the named files local and returns the folder that holds them.
    """

    name: str
    files: tuple[str, ...]
    fetch: Callable[[Sequence[str]], Path]

    def has(self, file: str) -> bool:
        """Whether the folder holds this file."""
        return file in self.files

    def local(self, file: str) -> Path:
        """This file's local path, fetched if need be.

        Raises:
            FileNotFoundError: if the folder has no such file.
        """
        if not self.has(file):
            raise FileNotFoundError(f"{self.name} has no file {file}")
        return self.fetch([file]) / file

    def json(self, file: str) -> dict[str, Any]:
        """This file's JSON object.

        Raises:
            FileNotFoundError: if the folder has no such file.
            ValueError: if it is no JSON object.
        """
        path = self.local(file)
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path} is no JSON: {error}") from None
        if not isinstance(value, dict):
            raise ValueError(f"{path} holds a JSON {type(value).__name__}, not an object")
        return value


def open_source(name: str | Path, revision: str | None = None) -> Source:
    """Open a local folder if there is one of this name, else a repository on the hub.

    A hub repository that has been fetched before is found without the network.

    Raises:
        FileNotFoundError: if neither exists.
        ValueError: if the hub has the repository but not `revision`, or asks for a login.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        files = tuple(sorted(p.relative_to(path).as_posix() for p in path.rglob("*") if p.is_file()))
        return Source(str(name), files, lambda _: path)
    if path.suffix in SUFFIXES and len(path.parts) != 2:
        raise FileNotFoundError(f"there is no file {name}")
    if path.exists() or len(path.parts) > 2 or str(name).startswith((".", "/", "~")):
        raise FileNotFoundError(f"there is no folder {name}")
    return _open_hub(str(name), revision)


def _open_hub(repo: str, revision: str | None) -> Source:
    import huggingface_hub as hub
    from huggingface_hub import errors

    shown = f"{repo} (revision {revision})" if revision else repo
    try:
        info = hub.HfApi().model_info(repo, revision=revision, timeout=HUB_TIMEOUT_SECONDS)
    except errors.HFValidationError:
        raise FileNotFoundError(
            f"there is no folder {repo} in {Path.cwd()}, and it is no name of a hub repository either"
        ) from None
    except errors.GatedRepoError:
        raise ValueError(f"{shown}: the hub wants a login that may read it (set HF_TOKEN)") from None
    except errors.RepositoryNotFoundError:
        raise FileNotFoundError(f"there is no folder {repo} in {Path.cwd()}, and the hub has no such repository") from None
    except errors.RevisionNotFoundError:
        raise ValueError(f"the hub's {repo} has no revision={revision}") from None
    except Exception as error:
        # Any failure to reach the hub, whatever its HTTP library calls it: fall back on what was fetched before.
        root = _cached(repo, revision)
        if root is None:
            raise FileNotFoundError(
                f"there is no folder {repo} in {Path.cwd()}, the hub cannot be reached ({type(error).__name__}), "
                f"and {shown} is not in its cache"
            ) from None
        cached = tuple(sorted(p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file()))
        return Source(shown, cached, lambda _: root)

    def fetch(wanted: Sequence[str]) -> Path:
        # By name rather than by commit, so that the cache knows the name when the network is away.
        root = Path(hub.snapshot_download(repo, revision=revision, allow_patterns=list(wanted)))
        if root.name != info.sha:
            raise ValueError(f"{shown} changed on the hub while it was being loaded; start again")
        return root

    return Source(shown, tuple(sorted(file.rfilename for file in info.siblings or ())), fetch)


def _cached(repo: str, revision: str | None) -> Path | None:
    """The folder of what was fetched of a repository before, though it is hardly ever all of it."""
    import huggingface_hub as hub
    from huggingface_hub import errors

    try:
        return Path(hub.snapshot_download(repo, revision=revision, local_files_only=True))
    except errors.LocalEntryNotFoundError as error:
        partial = getattr(error, "snapshot_path", None)  # huggingface_hub 2 says so of a part
        return Path(partial) if partial else None


def open_weights(
    source: Source, folder: str, *, from_pt: FromPt = "auto", variant: str | None = None
) -> tuple[Tensors, bool, str]:
    """Open the weights in a folder of a source: one file, or several with an index.

    Args:
        folder: `unet`, `vae`, ...; "" for the source itself.
        from_pt: True for PyTorch weights, False for Flax weights, "auto" for what is there
            (safetensors before pickles, PyTorch before Flax).
        variant: the infix of a second set of files, such as fp16. A folder without it gives its plain files
            if another folder of the source has the variant (SD 1.5's non_ema concerns the UNet alone).

    Returns:
        The tensors under the file's own keys, whether they are Flax's, and the file's name.

    Raises:
        FileNotFoundError: if there are no such weights, saying what is there.
        ValueError: if a file is damaged.
    """
    prefix = f"{folder}/" if folder else ""
    infix = f".{variant}" if variant else ""
    present = [f.removeprefix(prefix) for f in source.files if f.startswith(prefix) and "/" not in f.removeprefix(prefix)]
    if (
        variant
        and not any(infix in file for file in present)
        and any(f"{infix}." in f or f"{infix}-" in f for f in source.files)
    ):
        logger.info("%s: %s has no variant=%s; taking its plain weights", source.name, folder, variant)
        variant, infix = None, ""
    candidates: list[str] = []
    if from_pt in ("auto", True):
        for suffix in ("safetensors", "bin"):
            for stem in TORCH_STEMS:
                candidates += [f"{stem}{infix}.{suffix}", f"{stem}.{suffix}.index{infix}.json"]
    if from_pt in ("auto", False) and not variant:
        candidates += FLAX_FILES
    found = next((file for file in candidates if file in present), None)
    if found is None:
        asked = {"auto": "weights", True: "PyTorch weights (from_pt=true)", False: "Flax weights (from_pt=false)"}[from_pt]
        asked += f" of variant={variant}" if variant else ""
        there = ", ".join(present) or "nothing"
        raise FileNotFoundError(f"{source.name} has no {asked} in {folder or 'its folder'}; there is: {there}")
    files = [found]
    if found.endswith(".json"):
        files = sorted(set(source.json(prefix + found)["weight_map"].values()))
    return _open_files(source, prefix, files), found in FLAX_FILES, f"{source.name}/{prefix}{found}"


def _open_files(source: Source, prefix: str, names: Sequence[str]) -> Tensors:
    missing = [name for name in names if not source.has(prefix + name)]
    if missing:
        raise FileNotFoundError(f"{source.name}: the index names {', '.join(missing)}, which {prefix or 'it'} does not have")
    root = source.fetch([prefix + name for name in names])
    tensors: Tensors = {}
    for name in names:
        tensors.update(open_tensors(root / prefix / name))
    return tensors
