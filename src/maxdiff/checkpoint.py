"""A run's checkpoints: saved by Orbax in the background, and verified when they are restored.

Orbax does not notice a byte that changed in an array's file, so each save carries a checksum of every leaf,
which does not depend on how the leaf is split over devices.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from orbax.checkpoint import v1 as ocp

Tree = TypeVar("Tree")
logger = logging.getLogger(__name__)

MAX_LISTED = 8


class Checkpoints:
    """The checkpoints in a folder, one for each saved step; use it as a context manager.

    Args:
        folder: created if need be. One run at a time.
        keep_last: how many of the newest to keep; None keeps all.
        keep_every: also keep those whose step is a multiple of this.
        read_only: leave unfinished saves alone: they may be those of a run that is training now.

    Every process calls every method.
    """

    def __init__(
        self, folder: str | Path, *, keep_last: int | None = None, keep_every: int | None = None, read_only: bool = False
    ):
        self.folder = Path(folder)
        policies = ocp.training.preservation_policies
        keep: list[Any] = [policies.LatestN(keep_last)]
        if keep_every:
            keep.append(policies.EveryNSteps(keep_every))
        self._checkpointer = ocp.training.Checkpointer(
            str(self.folder.resolve()),
            preservation_policy=cast(Any, policies.AnyPreservationPolicy(keep)),
            cleanup_tmp_directories=not read_only,  # of saves that were interrupted
        )
        self._saving: Any = None

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.wait()
        finally:
            self._checkpointer.close()

    def steps(self) -> list[int]:
        """The steps of the complete checkpoints, ascending."""
        return sorted(checkpoint.step for checkpoint in self._checkpointer.checkpoints)

    def save(self, step: int, state: Any, notes: Mapping[str, Any] | None = None) -> None:
        """Start to save a tree of arrays; it may be donated or changed as soon as this returns.

        Waits for the save before, if that is still running.

        Args:
            notes: JSON to keep with it.

        Raises:
            OSError, ValueError: if the save before failed; the checkpoints before that are untouched.
        """
        self.wait()
        leaves = _named(state)
        sums = {name: int(value) for name, value in jax.device_get(checksums(leaves)).items()}
        metadata = {"checksums": sums, "notes": dict(notes or {})}
        self._saving = self._checkpointer.save_async(step, leaves, force=True, overwrite=True, custom_metadata=metadata)

    def wait(self) -> None:
        """Wait until the last save is on disk."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.result()

    def notes(self, step: int) -> dict[str, Any]:
        """The JSON that was kept with a checkpoint."""
        return self._metadata(step).get("notes", {})

    def restore(self, step: int, abstract: Tree, *, part: bool = False) -> Tree:
        """Read a checkpoint into the shapes, dtypes and shardings of `abstract`, whatever it was saved on.

        Args:
            abstract: the tree as jax.ShapeDtypeStructs with shardings.
            part: the checkpoint may hold more, which is not read.

        Raises:
            FileNotFoundError: if there is no such step, naming those there are.
            ValueError: if it holds other arrays than `abstract`, or is damaged, naming leaf and cause.
        """
        if step not in self.steps():
            there = ", ".join(map(str, self.steps())) or "none"
            raise FileNotFoundError(f"{self.folder} has no checkpoint of step {step} (there are: {there})")
        where = f"{self.folder / str(step)}"
        wanted = _named(abstract)
        try:
            stored: Any = self._checkpointer.metadata(step).metadata
            if stored is None:  # Orbax logs why, and gives nothing
                raise ValueError("its list of arrays cannot be read")
            _compare(wanted, {n: x for n, x in stored.items() if n in wanted} if part else stored, where)
            context = ocp.Context()
            context.pytree.loading.partial_load = part
            with context:
                leaves: Any = self._checkpointer.load(step, wanted)
            sums = self._metadata(step)["checksums"]
        except (ValueError, FileNotFoundError) as error:
            if str(error).startswith(where):
                raise
            raise ValueError(f"{where} cannot be restored: {_root_cause(error)}") from error
        except Exception as error:
            raise ValueError(f"{where} cannot be restored: {_root_cause(error)}") from error
        found = jax.device_get(checksums(leaves))
        damaged = [name for name in wanted if int(found[name]) != sums.get(name)]
        if damaged:
            raise ValueError(f"{where} is damaged: {_listed(damaged)} differ from what was saved")
        return jax.tree.unflatten(jax.tree.structure(abstract), [leaves[name] for name in wanted])

    def _metadata(self, step: int) -> dict[str, Any]:
        metadata: Any = self._checkpointer.metadata(step).custom_metadata
        return metadata or {}


def has_checkpoints(folder: Path) -> bool:
    """Whether `Checkpoints` would find any there; nothing is made or mended."""
    return folder.is_dir() and any(child.name.isdigit() for child in folder.iterdir())


def _named(tree: Any) -> dict[str, Any]:
    """The tree's leaves by their paths, joined with dots: names that don't depend on container types."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


@jax.jit
def checksums(leaves: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """For each leaf, the sum of bits * (2 * index + 1) modulo 2^32: catches flipped and exchanged values."""
    return {name: _checksum(leaf) for name, leaf in leaves.items()}


def _checksum(x: jax.Array) -> jax.Array:
    if x.dtype == jnp.bool_:
        x = x.astype(jnp.uint8)
    unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize]
    bits = lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)
    index = jnp.zeros(x.shape, jnp.uint32)
    stride = 1
    for dim in reversed(range(x.ndim)):
        # Built from iotas, so that each device numbers its own shard and nothing is gathered.
        index = index + lax.broadcasted_iota(jnp.uint32, x.shape, dim) * jnp.uint32(stride % 2**32)
        stride *= x.shape[dim]
    return jnp.sum(bits * (2 * index + 1), dtype=jnp.uint32)


def _compare(wanted: Mapping[str, Any], stored: Mapping[str, Any], where: str) -> None:
    """Raise ValueError where the stored arrays are not those wanted; Orbax would cast dtypes silently."""
    problems = []
    if missing := [name for name in wanted if name not in stored]:
        problems.append(f"it lacks {_listed(missing)}")
    if surplus := [name for name in stored if name not in wanted]:
        problems.append(f"this run has no {_listed(surplus)}")
    for name in wanted.keys() & stored.keys():
        ours, theirs = wanted[name], stored[name]
        if tuple(ours.shape) != tuple(theirs.shape) or np.dtype(ours.dtype) != np.dtype(theirs.dtype):
            shown = f"{np.dtype(theirs.dtype).name}{list(theirs.shape)}, here {np.dtype(ours.dtype).name}{list(ours.shape)}"
            problems.append(f"{name} is {shown}")
    if problems:
        rest = f" and {len(problems) - MAX_LISTED} more" if len(problems) > MAX_LISTED else ""
        raise ValueError(f"{where} is of another model or optimizer: {'; '.join(problems[:MAX_LISTED])}{rest}")


def _listed(names: list[str]) -> str:
    rest = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return ", ".join(names[:MAX_LISTED]) + rest


def _root_cause(error: BaseException) -> str:
    """Orbax wraps what happened several times; the first line of the innermost error."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"
