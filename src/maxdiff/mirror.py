"""A run in a bucket writes into a folder on its own disk, and what it writes there is copied to the bucket.

Checkpoints alone go to the bucket straight, and lock.json: see checkpoint.py and lock.py.
"""

import contextlib
import logging
import shutil
import threading
import time
from collections.abc import Container, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from maxdiff import bucket
from maxdiff.command import Lost
from maxdiff.config import Run
from maxdiff.processes import wait_for_all
from maxdiff.stop import Stopped

logger = logging.getLogger(__name__)

UPLOAD_SECONDS = 10.0  # between two looks for what has changed
# Files of long runs grow large: no more of the time than this is spent on uploads.
MAX_SHARE = 0.1
HEARTBEAT = "heartbeat.json"
HEARTBEAT_SECONDS = 1.0
# When a file was written last, and its bytes: changes with its contents.
Stamp = tuple[int, int]


class Mirror:
    """Keeps a bucket like a run's folder; a context manager, for one use. For a run on a disk it does nothing.

    Args:
        run: whose folder.
        fetched: files and folders that are copied from the bucket on entering it.
        uploads: whether this process copies what it writes to the bucket: every so often, and on leaving.

    Leaving it raises Lost if the last files cannot be uploaded, and keeps them; unless an error has ended the run
    anyway, which is what is told then.
    """

    def __init__(self, run: Run, fetched: Sequence[str], *, uploads: bool = True):
        self._run, self._fetched = run, fetched
        self._remote = bucket.is_bucket(run.place)
        self._uploads = self._remote and uploads
        self._stored: dict[str, Stamp] = {}
        self._one = threading.Lock()
        self._ends = threading.Event()
        # Two threads: a large file must not hold the heartbeat up.
        self._threads = [threading.Thread(target=work, name="mirror", daemon=True) for work in (self._keep, self._beat)]

    def __enter__(self) -> "Mirror":
        if self._remote:
            self._run.folder.mkdir(parents=True, exist_ok=True)
            wait_for_all("the run is held")  # so that whoever held it before has written its last
            self._stored = self._changed()  # config.yml, which was fetched to know the run
            self.fetch(self._fetched)
        if self._uploads:
            for thread in self._threads:
                thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not self._uploads:
            return
        self._ends.set()
        for thread in self._threads:
            thread.join()
        try:
            self.upload()
        except OSError as failed:
            kept = self._run.folder.rename(f"{self._run.folder}-kept")  # the other goes with the process
            message = f"the last files could not be written to {self._run.place}, and are kept in {kept}: {failed}"
            if error is None or isinstance(error, Stopped):
                raise Lost(message) from failed
            logger.error("%s", message)
        else:
            shutil.rmtree(self._run.folder, ignore_errors=True)

    def fetch(self, names: Sequence[str]) -> None:
        """Copy files and folders from the bucket, as far as they are there; raises as `bucket.fetch`."""
        self._remember(bucket.fetch(self._run.place, self._run.folder, names))

    def fetch_files(self, where: str, names: Container[str]) -> None:
        """Copy from one of the run's folders the files of these names that are there, and not here; raises as `fetch`."""
        if self._remote:
            place, folder = self._run.place / where, self._run.folder / where
            there = bucket.listing(place, deep=False)
            wanted = [(name, stored) for name, stored in there if name in names and not (folder / name).exists()]
            self._remember(str(Path(where, name)) for name in bucket.copy_all(place, folder, wanted))

    def _remember(self, fetched: Iterable[str]) -> None:
        self._stored |= {name: stamp for name in fetched if (stamp := _stamp(self._run.folder / name))}

    def upload(self) -> None:
        """Copy to the bucket, now, all that has changed; raises OSError."""
        if self._uploads:
            self._upload(self._changed())

    def _upload(self, changed: dict[str, Stamp]) -> None:
        with self._one, ThreadPoolExecutor(bucket.AT_ONCE) as pool:
            list(pool.map(self._store, changed, changed.values()))

    def _store(self, name: str, stamp: Stamp) -> None:
        bucket.store(self._run.folder / name, self._run.place / name)
        self._stored[name] = stamp

    def _changed(self) -> dict[str, Stamp]:
        folder, found = self._run.folder, {}
        for path in folder.rglob("[!.]*"):  # what has a dot is being written
            name, stamp = path.relative_to(folder).as_posix(), _stamp(path)
            if stamp and self._stored.get(name) != stamp:
                found[name] = stamp
        return found

    def _keep(self) -> None:
        failing, wait = False, UPLOAD_SECONDS
        while not self._ends.wait(wait):
            started = time.monotonic()
            try:
                self._upload({name: stamp for name, stamp in self._changed().items() if name != HEARTBEAT})
            except OSError as error:
                if not failing:
                    logger.error("UPLOADS TO %s FAIL, and are tried again: %s", self._run.place, error)
                failing = True
            else:
                if failing:
                    logger.warning("uploads to %s work again", self._run.place)
                failing = False
            wait = max(UPLOAD_SECONDS, (time.monotonic() - started) / MAX_SHARE)

    def _beat(self) -> None:
        """The heartbeat as soon as there is another; if that fails, others will, and `_keep` tells."""
        path = self._run.folder / HEARTBEAT
        while not self._ends.wait(HEARTBEAT_SECONDS):
            stamp = _stamp(path)
            if stamp and self._stored.get(HEARTBEAT) != stamp:
                with contextlib.suppress(OSError):
                    self._store(HEARTBEAT, stamp)


def _stamp(path: Path) -> Stamp | None:
    """None if there is no such file, or no more."""
    try:
        stat = path.stat()
    except FileNotFoundError:
        return None
    return (stat.st_mtime_ns, stat.st_size) if path.is_file() else None
