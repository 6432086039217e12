"""A run's checkpoints: saved by Orbax in the background, and verified when they are restored.

    python -m maxdiff.checkpoint list runs/my_run
    python -m maxdiff.checkpoint verify runs/my_run [step=1000]
    python -m maxdiff.checkpoint export runs/my_run [step=1000] [key=value ...]

Orbax does not notice a byte that changed in an array's file, so each save carries a checksum of every leaf,
which does not depend on how the leaf is split over devices.
"""

import collections
import contextlib
import dataclasses
import errno
import itertools
import logging
import math
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from orbax.checkpoint import v1 as ocp

from maxdiff import bucket
from maxdiff.checksums import checksums, named
from maxdiff.processes import agree, wait_for_all
from maxdiff.sharding import bytes_a_device

Tree = TypeVar("Tree")
logger = logging.getLogger(__name__)

MAX_LISTED = 8
# What a disk that is not damaged may say.
PASSING = {errno.ESTALE, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ETIMEDOUT, errno.EACCES, errno.EPERM}
# What Orbax calls a save that is not finished. In a bucket, where nothing can be renamed at once, it has its last name
# from the start, and this file when it's finished.
UNFINISHED = "orbax-checkpoint-tmp"
FINISHED = "commit_success.txt"


class DamagedCheckpoint(ValueError):
    """A checkpoint that cannot be read, or is not as it was saved."""


class Checkpoints:
    """The checkpoints in a folder, one for each saved step; use it as a context manager.

    Args:
        folder: created if need be; it may be in a bucket. One run at a time.
        keep_last: how many of the newest to keep; None keeps all.
        keep_every: also keep the first at or after each multiple of this.
        keep_best: also keep the one with the least held-out loss of those that have one, see `losses`.
        read_only: make no folder, and leave unfinished saves alone: they may be those of a run that is training now.

    Every process calls every method.

    Attributes:
        losses: the held-out loss of steps, which whoever measures it fills in.

    Raises:
        ValueError: for a bucket that cannot be looked at.
        FileNotFoundError: if there is no folder to read.
    """

    def __init__(self, folder: str | Path, *, keep_last: int | None = None, keep_every: int | None = None,
                 keep_best: bool = False, read_only: bool = False):  # fmt: skip
        self.folder = bucket.place(folder)
        if bucket.is_bucket(self.folder):
            bucket.check(self.folder)  # Orbax would make one
        elif read_only and not self.folder.is_dir():
            raise FileNotFoundError(f"there is no folder {self.folder}")
        self.losses: dict[int, float] = {}
        policies = ocp.training.preservation_policies
        keep: list[Any] = [policies.LatestN(keep_last)]
        if keep_every:
            keep.append(_Every(keep_every))
        if keep_best:
            keep.append(_Best(self.losses))
        context = ocp.Context()
        # Where a folder cannot be made in the background, what is to write into it waits for five minutes.
        context.asynchronous.create_directories_asynchronously = jax.process_count() > 1
        self._checkpointer = ocp.training.Checkpointer(
            str(self.folder if bucket.is_bucket(self.folder) else self.folder.resolve()),
            preservation_policy=cast(Any, policies.AnyPreservationPolicy(keep)),
            cleanup_tmp_directories=not read_only,  # of saves that were interrupted
            context=context,
        )
        # Orbax asks at each save whether a preemption is due, by the save's step. JAX, which agrees with all processes on the
        # number to stop at, takes every question for a step's: by a lower number a process would miss it (see stop.py).
        cast(Any, self._checkpointer)._manager.reached_preemption = lambda _: False
        self._saving: Any = None
        self._programs: Any = None
        self._sizes: dict[Any, int] = {}
        self._thread = ThreadPoolExecutor(1, "checkpoint")

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            self._checkpointer.close()

    def steps(self) -> list[int]:
        """The steps of the complete checkpoints, ascending."""
        return sorted(checkpoint.step for checkpoint in self._checkpointer.checkpoints)

    def save(self, step: int, state: Any, notes: Mapping[str, Any] | None = None) -> None:
        """Start to save a tree of arrays; it may be donated or changed as soon as this returns.

        Where the devices have room for it they copy the tree, which takes milliseconds, and a thread reads and writes the
        copy. Else, and with several processes, this returns when the host has read it all. If the save before is running,
        it waits for that.

        Args:
            notes: JSON to keep with it.

        Raises:
            OSError, ValueError: if the save before failed; the checkpoints before that are untouched.
        """
        self.wait()
        leaves = named(state)
        if jax.process_count() == 1 and _room_for(self._sizes or _sizes(leaves)):
            copy, sums = self._programs or (_copy, checksums)
            self._saving = self._thread.submit(self._write, step, copy(leaves), sums, notes)
        else:
            self._saving = self._begin(step, leaves, checksums(leaves), notes)

    def prepare(self, abstract: Any) -> None:
        """Find out and compile now what saving such a tree needs, so that no save waits for that."""
        leaves = named(abstract)
        self._sizes = _sizes(leaves)
        self._programs = _copy.lower(leaves).compile(), checksums.lower(leaves).compile()

    def _write(self, step: int, leaves: dict[str, jax.Array], sums: Any, notes: Mapping[str, Any] | None) -> None:
        sums = sums(leaves)
        # One after another: what the loop fetches of a step must not queue behind gigabytes.
        host = {name: np.asarray(leaves.pop(name)) for name in list(leaves)}
        self._begin(step, host, sums, notes).result()

    def _begin(self, step: int, leaves: Mapping[str, Any], sums: Mapping[str, Any], notes: Mapping[str, Any] | None) -> Any:
        found = {name: int(value) for name, value in jax.device_get(sums).items()}
        metadata = {"checksums": found, "notes": dict(notes or {})}
        return self._checkpointer.save_async(step, leaves, force=True, overwrite=True, custom_metadata=metadata)

    def wait(self) -> None:
        """Wait until the last save is on disk; raises what it failed with, and leaves nothing of it behind."""
        saving, self._saving = self._saving, None
        if saving is not None:
            try:
                saving.result()
            except BaseException:
                self._clear_unfinished()
                # Orbax raises it once more in each thread that asks for anything: those that save, and close.
                for call in (self._thread.submit(self._checkpointer.wait).result, self._checkpointer.wait):
                    with contextlib.suppress(Exception):
                        call()
                raise

    def notes(self, step: int) -> dict[str, Any]:
        """The JSON that was kept with a checkpoint."""
        return self._metadata(step).get("notes", {})

    def checksums(self, step: int) -> dict[str, int]:
        """The checksum of each array, as it was when it was saved."""
        return self._metadata(step)["checksums"]

    def restore(self, step: int, abstract: Tree, *, part: bool = False) -> Tree:
        """Read a checkpoint into the shapes, dtypes and shardings of `abstract`, whatever it was saved on.

        Args:
            abstract: the tree as jax.ShapeDtypeStructs with shardings.
            part: the checkpoint may hold more, which is not read.

        Raises:
            FileNotFoundError: if there is no such step, naming those there are.
            ValueError: if it holds other arrays than `abstract`, naming them.
            DamagedCheckpoint: if it is damaged, naming leaf and cause; on all processes, if it is to one.
        """
        wanted = named(abstract)
        stored = self._listed_by_all(step)
        _compare(wanted, {n: x for n, x in stored.items() if n in wanted} if part else stored, f"{self.folder / str(step)}")
        leaves = self._load(step, wanted, part)
        return jax.tree.unflatten(jax.tree.structure(abstract), [leaves[name] for name in wanted])

    def verify(self, step: int) -> int:
        """Read all of a checkpoint into this host's memory; returns its bytes, raises as `restore`."""
        here = jax.sharding.SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
        arrays = self._arrays(step)
        self._load(step, {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here) for name, x in arrays.items()})
        return sum(math.prod(x.shape) * np.dtype(x.dtype).itemsize for x in arrays.values())

    def set_aside(self, step: int) -> Path:
        """Rename a damaged checkpoint, so that it is none any more and nothing of it is lost; returns where it is."""
        names = (f"damaged-{step}" + (f"-{n}" if n else "") for n in itertools.count())
        path = next(path for path in map(self.folder.joinpath, names) if not path.exists())
        if jax.process_index() == 0:
            (self.folder / str(step)).rename(path)
        wait_for_all("a checkpoint was set aside")
        self._checkpointer.reload()
        return path

    def _listed_by_all(self, step: int) -> dict[str, Any]:
        """As `_arrays`; raises on all processes if it does on one, which may have looked when the run let go of the step."""
        try:
            stored, failed = self._arrays(step), None
        except (FileNotFoundError, DamagedCheckpoint) as error:
            stored, failed = {}, error
        if not agree(failed is None):
            raise failed or DamagedCheckpoint(f"{self.folder / str(step)} cannot be restored by another process")
        return stored

    def _arrays(self, step: int) -> dict[str, Any]:
        """Name -> shape and dtype of what is stored; raises FileNotFoundError if there is no such step."""
        if isinstance(self._saving, Future):
            futures.wait([self._saving])  # Orbax does one thing at a time
        if step not in self.steps():
            there = ", ".join(map(str, self.steps())) or "none"
            raise FileNotFoundError(f"{self.folder} has no checkpoint of step {step} (there are: {there})")
        try:
            stored: Any = self._checkpointer.metadata(step).metadata
        except Exception as error:
            raise DamagedCheckpoint(f"{self.folder / str(step)} cannot be restored: {root_cause(error)}") from error
        if stored is None:  # Orbax logs why, and gives nothing
            raise DamagedCheckpoint(f"{self.folder / str(step)} cannot be restored: its list of arrays cannot be read")
        return stored

    def _load(self, step: int, wanted: dict[str, Any], part: bool = False) -> dict[str, Any]:
        """The arrays, when their checksums are right."""
        where, leaves, sums, failed = self.folder / str(step), {}, {}, ""
        context = ocp.Context()
        context.pytree.loading.partial_load = part
        try:
            with context:
                leaves = cast(Any, self._checkpointer.load(step, wanted))
            sums = self.checksums(step)
        except Exception as error:
            if _says_nothing_of_damage(error):
                raise
            failed = f"{where} cannot be restored: {root_cause(error)}"
        if not agree(not failed):  # before what is computed on the devices of all
            raise DamagedCheckpoint(failed or f"{where} cannot be restored by another process")
        found = jax.device_get(checksums(leaves))
        damaged = [name for name in wanted if int(found[name]) != sums.get(name)]
        if damaged:
            raise DamagedCheckpoint(f"{where} is damaged: {_listed(damaged)} differ from what was saved")
        return leaves

    def _clear_unfinished(self) -> None:
        """What is left of a save that failed would take the room that the next one needs."""
        if jax.process_index() != 0:
            return
        if bucket.is_bucket(self.folder):
            with contextlib.suppress(OSError):
                for step in list(_steps_in_bucket(self.folder, finished=False)):
                    bucket.remove_folder(self.folder / str(step))
            return
        for path in self.folder.glob(f"*{UNFINISHED}*"):
            shutil.rmtree(path, ignore_errors=True)

    def _metadata(self, step: int) -> dict[str, Any]:
        metadata: Any = self._checkpointer.metadata(step).custom_metadata
        return metadata or {}


def restore_latest(checkpoints: Checkpoints, abstract: Tree) -> tuple[int, Tree]:
    """(step, state) of the newest checkpoint that is whole; damaged ones are named, loudly, and set aside.

    Raises:
        ValueError: if none is whole, or one is of other arrays than `abstract`: that is no damage.
    """
    damaged = []
    while steps := checkpoints.steps():
        try:
            return steps[-1], checkpoints.restore(steps[-1], abstract)
        except DamagedCheckpoint as error:
            damaged.append(checkpoints.set_aside(steps[-1]))
            logger.error("%s; IT IS NOT USED, and kept as %s", error, damaged[-1])
    raise ValueError(f"no checkpoint of {checkpoints.folder} is whole (damaged: {', '.join(map(str, damaged))}); allowed: to "
                     "mend one, or another run_name")  # fmt: skip


@dataclasses.dataclass(frozen=True)
class _Every:
    """Orbax's PreservationPolicy that keeps the first at or after each multiple of a step.

    Its own EveryNSteps keeps the multiples alone, and a run that saves after so many examples may never save at one.
    """

    every: int

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:  # noqa: ARG002
        parts = [info.step // self.every for info in checkpoints]
        return [part > before for before, part in zip([0, *parts], parts, strict=False)]


@dataclasses.dataclass(frozen=True)
class _Best:
    """Orbax's PreservationPolicy that keeps the step of the least loss."""

    losses: Mapping[int, float]

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:  # noqa: ARG002
        known = {info.step: self.losses[info.step] for info in checkpoints if info.step in self.losses}
        best = min(known, key=lambda step: known[step], default=None)
        return [info.step == best for info in checkpoints]


def has_checkpoints(folder: Path) -> bool:
    """Whether `Checkpoints` would find any there; nothing is made or mended."""
    return newest_step(folder) is not None


def newest_step(folder: Path) -> int | None:
    """The step of the newest checkpoint there; None if there is none."""
    if bucket.is_bucket(folder):
        return next(_steps_in_bucket(folder, finished=True), None)
    return max(saved_steps(folder), default=None)


def saved_steps(folder: Path) -> list[int]:
    """The steps of the complete checkpoints there, ascending, whether or not a run is training; nothing is made or mended."""
    if bucket.is_bucket(folder):
        return sorted(_steps_in_bucket(folder, finished=True))
    return sorted(int(child.name) for child in folder.iterdir() if child.name.isdigit()) if folder.is_dir() else []


def _steps_in_bucket(folder: Path, finished: bool) -> Iterator[int]:
    """The steps whose save is finished, or is not, descending."""
    for step in sorted((int(name) for name, _ in bucket.listing(folder, deep=False) if name.isdigit()), reverse=True):
        if (bucket.read(folder / str(step) / FINISHED) is not None) == finished:
            yield step


@jax.jit
def _copy(leaves: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {name: jnp.copy(leaf) for name, leaf in leaves.items()}


def _sizes(leaves: Mapping[str, Any]) -> dict[Any, int]:
    """Bytes that each device of this process has of these arrays, or abstract arrays."""
    found: collections.Counter[Any] = collections.Counter()
    for leaf in leaves.values():
        for device in leaf.sharding.addressable_devices:
            found[device] += bytes_a_device(leaf)
    return dict(found)


def _room_for(sizes: Mapping[Any, int]) -> bool:
    """Whether every device has room for so many bytes beside the most that it ever used."""
    for device, size in sizes.items():
        stats = device.memory_stats()  # None on CPU
        if stats and stats["peak_bytes_in_use"] + 1.1 * size > stats["bytes_limit"]:
            return False
    return True


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


def _says_nothing_of_damage(error: BaseException | None) -> bool:
    """Whether what went wrong is no fault of the checkpoint: too little memory, a disk or a bucket that does not answer."""
    while error is not None:
        if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in PASSING):
            return True
        if any(word in str(error) for word in ("RESOURCE_EXHAUSTED", "UNAVAILABLE", "DEADLINE_EXCEEDED", "PERMISSION_DENIED")):
            return True
        error = error.__cause__
    return False


def root_cause(error: BaseException) -> str:
    """Orbax wraps what happened several times; the first line of the innermost error."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"


if __name__ == "__main__":
    from maxdiff.checkpoint_command import main

    sys.exit(main(sys.argv[1:]))
