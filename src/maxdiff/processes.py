"""One run in several processes: how they find each other, who speaks, and how weights come together."""

import json
import os
import secrets
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from maxdiff import bucket
from maxdiff.config import Run

# How long a process that ends waits for the others. They wait for the export before, so at a run's end this is no
# time at all; a process that failed alone takes the others with it after this.
SHUTDOWN_SECONDS = 60
# A Slurm step's tasks know each other by these.
SLURM = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")
# How many processes a launcher of MPI jobs says there are: Open MPI's, MPICH's and Intel's.
MPI_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
# By this Open MPI 4 says where the first process is; Open MPI 5 has nothing of the kind.
OPEN_MPI = "OMPI_MCA_orte_hnp_uri"
# A pod of Kubernetes that is one of several has one of these.
POD_OF_SEVERAL = ("JOB_COMPLETION_INDEX", "TPU_WORKER_HOSTNAMES", "TPU_PROCESS_ADDRESSES", "TPU_PROCESS_ADDRESSES_PATH")


def start(run: Run, shutdown_seconds: int = SHUTDOWN_SECONDS) -> None:
    """Join the other processes of this job, before anything else asks jax for its devices.

    1. skip_jax_distributed_system: this process is alone.
    2. coordinator_address, num_processes and process_id, or the environment's JAX_COORDINATOR_ADDRESS,
       JAX_NUM_PROCESSES and JAX_PROCESS_ID.
    3. What Slurm, Open MPI 4, a TPU pod or Kubernetes says of itself; without any of them this process is alone.

    Args:
        shutdown_seconds: how long a process that ends waits for the others.

    Raises:
        ValueError: for a coordinator without the number of processes, or the other way round, and under an MPI
            launcher that does not say where the first process is.
    """
    if run.skip_jax_distributed_system:
        return
    address = run.coordinator_address or os.environ.get("JAX_COORDINATOR_ADDRESS", "")
    given = {"num_processes": run.num_processes, "process_id": run.process_id}
    given = {key: _number(f"JAX_{key.upper()}") if value == -1 else value for key, value in given.items()}
    shown = ", ".join(f"{key}={value}" for key, value in given.items())
    if run.coordinator_address or (address and set(given.values()) != {-1}):
        if not 0 <= given["process_id"] < given["num_processes"]:
            raise ValueError(f"{shown}: with coordinator_address, 0 <= process_id < num_processes is needed")
        # No detection: it would ask Kubernetes and others for what is known.
        _initialize(shutdown_seconds, coordinator_address=address, **given, cluster_detection_method="deactivate")
    elif set(given.values()) != {-1}:
        raise ValueError(f"{shown} needs coordinator_address")
    else:
        _check_mpi()
        if not _alone():
            _detect(shutdown_seconds)


def _check_mpi() -> None:
    """Raise ValueError in a job of several that each would take itself to be alone, or for a task of Slurm."""
    size = max(map(_number, MPI_SIZES))
    if size > 1 and OPEN_MPI not in os.environ and not (_in_slurm() and _slurm_tasks() == size):
        raise ValueError(
            f"this is one of {size} processes of an MPI job, and nothing says where the first is: "
            "give coordinator_address, num_processes and process_id (or skip_jax_distributed_system=True)"
        )


def _alone() -> bool:
    """Whether the environment says that this process has no others, whatever JAX would make of it."""
    if OPEN_MPI in os.environ:
        return _number("OMPI_COMM_WORLD_SIZE") == 1
    if _in_slurm():
        return _slurm_tasks() == 1
    # JAX takes any pod for one of a Job, and asks the cluster about it.
    return "KUBERNETES_SERVICE_HOST" in os.environ and not any(name in os.environ for name in POD_OF_SEVERAL)


def _detect(shutdown_seconds: int) -> None:
    """Join the others that JAX finds; without any, this process is alone."""
    with warnings.catch_warnings():
        if "JOB_COMPLETION_INDEX" not in os.environ:
            warnings.simplefilter("ignore")  # of clusters that it recognises but has no client for
        try:
            _initialize(shutdown_seconds)
        except ValueError as error:
            if "coordinator_address" not in str(error):
                raise
            # No cluster: this process is alone.


def _initialize(shutdown_seconds: int, **arguments: Any) -> None:
    jax.distributed.initialize(**arguments, local_device_ids=_devices(), shutdown_timeout_seconds=shutdown_seconds)


def _devices() -> list[int] | None:
    """The GPUs of this process, by their numbers; [] for all that it sees, None for what JAX_LOCAL_DEVICE_IDS says.

    Left to itself JAX gives each process of Slurm and Open MPI one GPU, that of its number on the host. That is wrong
    where a process has the host for itself, or where the launcher has already hidden the others' GPUs from it.
    """
    if "JAX_LOCAL_DEVICE_IDS" in os.environ:
        return None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if (visible and "," not in visible) or "SLURM_GPUS_PER_TASK" in os.environ:
        return []
    if OPEN_MPI in os.environ:
        return [_number("OMPI_COMM_WORLD_LOCAL_RANK")] if _number("OMPI_COMM_WORLD_LOCAL_SIZE") > 1 else []
    if _in_slurm() and _slurm_tasks() != _number("SLURM_STEP_NUM_NODES"):
        return [_number("SLURM_LOCALID")]
    return []


def _in_slurm() -> bool:
    return all(name in os.environ for name in SLURM)


def _slurm_tasks() -> int:
    # The step's own count: in an interactive step SLURM_NTASKS is that of the allocation around it.
    return _number("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")


def _number(*names: str) -> int:
    """The first of these environment variables that is a number; -1 if none is."""
    values = (os.environ.get(name, "") for name in names)
    return next((int(value) for value in values if value.isdigit()), -1)


def say(text: str) -> None:
    """Print a line, from the first process alone."""
    if jax.process_index() == 0:
        print(text, flush=True)


def gather(tree: Any) -> Any:
    """The tree for the first process to read, whichever devices have its parts; every process calls it.

    With several processes the first gets numpy arrays, and the others None for each: a host that runs many of
    them need not hold the weights as many times.
    """
    if jax.process_count() == 1:
        return tree

    def whole(x: jax.Array) -> Any:
        found = multihost_utils.process_allgather(x, tiled=True)
        return found if jax.process_index() == 0 else None

    return jax.tree.map(whole, tree)


def agreed(value: Any) -> Any:
    """The first process's array, on every one of them."""
    return value if jax.process_count() == 1 else np.asarray(multihost_utils.broadcast_one_to_all(value))


def agreed_json(make: Callable[[], Any]) -> Any:
    """What `make` returns in the first process, a JSON value, on every one of them; the others do not call it."""
    text = json.dumps(make() if jax.process_index() == 0 else None).encode()
    size = int(agreed(np.int32(len(text))))
    # What is broadcast has one shape on all.
    return json.loads(agreed(np.frombuffer(text[:size].ljust(size), np.uint8)).tobytes())


def agree(fine: bool) -> bool:
    """Whether all is fine on every process."""
    return fine if jax.process_count() == 1 else bool(multihost_utils.process_allgather(np.array(fine)).all())


def check_shared(folder: Path) -> None:
    """Raise ValueError, on every process, unless all see the same folder: else saving would wait for ever."""
    if jax.process_count() == 1:
        return
    token = int(multihost_utils.broadcast_one_to_all(np.int32(secrets.randbelow(2**31))))
    path = folder / f".seen-by-all-{token}"
    if jax.process_index() == 0:
        path.touch()
    wait_for_all("a file is there")
    # A network disk may say of one name that it's not there when it was not lately, but not of a whole folder.
    there = path.exists() if bucket.is_bucket(folder) else path.name in os.listdir(folder)
    seen = multihost_utils.process_allgather(np.array(there))
    path.unlink(missing_ok=True)
    if not seen.all():
        blind = ", ".join(map(str, np.flatnonzero(~seen)))
        raise ValueError(f"output_dir: {folder} of process 0 is not that of process {blind}; allowed: a folder that all share")


def wait_for_all(name: str) -> None:
    """Wait until every process is here; `name` is of this place in the program."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)
