"""Files that are elsewhere: copied once, whole or not at all."""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from maxdiff.data import progress, remote
from maxdiff.data.progress import Progress
from maxdiff.data.sources import Format, open_source
from tests.data.test_sources import contents, pairs, write_tar
from tests.data.test_tables import EXPECTED, ROWS, write_array, write_parquet


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """A folder with three tars of two examples each."""
    (tmp_path / "shards").mkdir()
    for i in range(3):
        write_tar(tmp_path / "shards" / f"s-{i}.tar", pairs(2 * i, 2 * i + 2))
    return tmp_path / "shards"


@pytest.fixture
def memory(shards: Path) -> Iterator[Any]:
    files = fsspec.filesystem("memory")
    for path in shards.iterdir():
        files.pipe(f"/bucket/{path.name}", path.read_bytes())
    yield files
    files.store.clear()


def captions(source: Any) -> list[str]:
    return [caption for _, caption in contents(source)]


def copies(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir() if not path.name.endswith(".index"))


@pytest.mark.parametrize(
    "pattern", ["memory://bucket/s-{0..2}.tar", "memory://bucket/s-*.tar", "file://@/s-*.tar", "pipe:cat @/s-{0..2}.tar"]
)
def test_files_elsewhere_are_copied_once(
    shards: Path, memory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pattern: str
):
    pattern, cache = pattern.replace("@", str(shards)), tmp_path / "cache"
    first = open_source(pattern, cache_dir=cache)
    assert captions(first) == [f"caption {i}" for i in range(6)]
    assert len(copies(cache)) == 3
    memory.pipe("/bucket/s-0.tar", b"something else")
    monkeypatch.setattr(remote, "_read", None)
    monkeypatch.setattr(remote, "_pipe", None)
    again = open_source(pattern, cache_dir=cache)
    assert captions(again) == captions(first)
    assert again.fingerprint() == first.fingerprint()


def test_files_of_one_name_do_not_collide(memory: Any, tmp_path: Path):
    memory.pipe("/other/s-0.tar", memory.cat("/bucket/s-2.tar"))
    cache = tmp_path / "cache"
    assert captions(open_source("memory://{bucket,other}/s-0.tar", cache_dir=cache)) == [f"caption {i}" for i in (0, 1, 4, 5)]


def test_other_kinds_elsewhere(tmp_path: Path):
    a, b, cache = (
        write_parquet(tmp_path / "a.parquet", ROWS),
        write_array(tmp_path / "a.array_record-00000-of-00001", ROWS),
        tmp_path / "c",
    )
    for path in (f"file://{a}", f"pipe:cat {a}", f"file://{b}", f"pipe:cat < {b}"):
        assert contents(open_source(path, cache_dir=cache)) == EXPECTED
    os.rename(a, tmp_path / "plain")
    assert contents(open_source(f"pipe:cat {tmp_path / 'plain'}", cache_dir=cache, form=Format("parquet"))) == EXPECTED
    with pytest.raises(ValueError, match=r"dataset_type='table' is of local files \(elsewhere: webdataset, parquet"):
        open_source("memory://a.csv", cache_dir=cache)
    with pytest.raises(ValueError, match=r"names memory://a.tar.gz, which is not a tar"):
        open_source("memory://a.tar.gz", cache_dir=cache)


def test_a_folder_for_copies_is_required(tmp_path: Path, memory: Any):
    with pytest.raises(ValueError, match=r"path='memory://bucket/s-0.tar' is copied .*: dataset_save_location is required"):
        open_source("memory://bucket/s-0.tar")
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"dataset_save_location='.*file' cannot be written to"):
        open_source("memory://bucket/s-0.tar", cache_dir=tmp_path / "file")


FAILURES = {
    "exit": ("pipe:cat @/s-0.tar; echo no such bucket >&2; exit 3", "failed with exit code 3: no such bucket$"),
    "pipeline": ("pipe:false | cat - @/s-0.tar", "failed with exit code 1"),
    "cut": ("pipe:head -c 2000 @/s-0.tar", "was cut off, or is no such file: 2000 bytes came"),
    "empty": ("pipe:true", "was cut off, or is no such file: 0 bytes came"),
    "signal": ("pipe:kill -9 $$", "failed with exit code -9"),
    "not there": ("memory://bucket/none.tar", "memory://bucket/none.tar cannot be copied: FileNotFoundError"),
    "no bucket": ("nosuch://bucket/a.tar", "nosuch://bucket/a.tar cannot be copied: ValueError: Protocol not known"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_copy_that_fails_leaves_nothing(shards: Path, memory: Any, tmp_path: Path, name: str):
    pattern, message = FAILURES[name]
    cache = tmp_path / "cache"
    with pytest.raises(ValueError, match=message):
        open_source(pattern.replace("@", str(shards)), cache_dir=cache)
    assert not cache.exists() or not list(cache.iterdir())


def test_nothing_matches(memory: Any, tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=r"nothing matches memory://bucket/x-\*.tar"):
        open_source("memory://bucket/x-*.tar", cache_dir=tmp_path)


def test_a_transfer_that_is_cut(shards: Path, memory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    info = type(memory).info
    monkeypatch.setattr(type(memory), "info", lambda self, path: {**info(self, path), "size": 10**6})
    with pytest.raises(ValueError, match=r"memory://bucket/s-1.tar was cut off: \d+ of 1000000 bytes came"):
        open_source("memory://bucket/s-1.tar", cache_dir=tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())


def test_one_failure_stops_the_others(shards: Path, tmp_path: Path):
    started = time.monotonic()
    endless = f"while cat {shards}/s-0.tar; do sleep 0.01; done"
    with pytest.raises(ValueError, match="exit code 4"):
        open_source(f"pipe:{{exit 4,{endless}}}", cache_dir=tmp_path / "cache", form=Format("webdataset"))
    assert time.monotonic() - started < 30
    assert not list((tmp_path / "cache").iterdir())


def test_a_missing_file_system_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(__import__("sys").modules, "fsspec", None)
    with pytest.raises(ValueError, match=r"gs://b/a.tar needs fsspec .*: pip install 'maxdiff\[remote\]'"):
        open_source("gs://b/a.tar", cache_dir=tmp_path)


def test_progress_is_told_of_what_takes_long(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    quick = Progress("quick", 1)
    quick.add(files=1)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(progress, "FIRST", 0.0)
    slow = Progress("copying", 2)
    slow.add(size=10**9)
    slow.add(files=1)
    slow.add(files=1, size=10**9)
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["copying: 0 of 2 files, 1.0 GB, 0 s", "copying: 2 of 2 files, 2.0 GB, 0 s"]
