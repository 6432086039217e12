"""The lean reader of tars finds what tarfile finds, in every format, and refuses what tarfile refuses."""

import io
import os
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from maxdiff.data import tar_headers
from maxdiff.data.sources import open_source
from maxdiff.data.tar_headers import NotPlain, members
from tests.data.test_sources import contents, pairs, write_tar


def outcome(function: Any, path: Path) -> Any:
    """What it finds, or why it refuses."""
    try:
        return list(function(path))
    except tarfile.TarError as error:
        return str(error)


def is_plain(path: Path) -> bool:
    try:
        return list(tar_headers._plain(path)) is not None
    except NotPlain:
        return False


def check(path: Path) -> Any:
    expected = outcome(tar_headers._any, path)
    assert outcome(members, path) == expected
    return expected


def add(tar: tarfile.TarFile, name: str, data: bytes = b"", **attributes: Any) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for key, value in attributes.items():
        setattr(info, key, value)
    tar.addfile(info, io.BytesIO(data))


NAMES = ["a.png", "folder/a.txt", "x" * 99, "é ü.png", "p" * 90 + "/" + "q" * 90 + ".png"]


@pytest.mark.parametrize("format_", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_formats(tmp_path: Path, format_: int):
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w", format=format_) as tar:
        for number, name in enumerate(NAMES):
            add(tar, name, b"x" * (511 + number), mtime=number, uname="someone", mode=0o600, uid=1000)
        add(tar, "folder", type=tarfile.DIRTYPE)
        add(tar, "last.png", b"y")
    assert [name for name, _, _ in check(path)] == [*NAMES, "last.png"]
    assert is_plain(path) == (format_ == tarfile.USTAR_FORMAT)


@pytest.mark.parametrize(
    "attributes",
    [{"type": tarfile.SYMTYPE, "linkname": "a"}, {"type": tarfile.LNKTYPE, "linkname": "a"}, {"type": tarfile.AREGTYPE}, {"mtime": 0.5},
     {"type": tarfile.FIFOTYPE}, {"type": tarfile.CONTTYPE}, {"uid": 2**40}, {"pax_headers": {"path": "other.png"}}, {"name": "y" * 101}],
    ids=str,
)  # fmt: skip
def test_members_that_are_not_plain(tmp_path: Path, attributes: dict[str, Any]):
    attributes = dict(attributes)
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        add(tar, "a.png", b"1")
        add(tar, attributes.pop("name", "b.png"), **attributes)
        add(tar, "c.png", b"3")
    found = check(path)
    assert found[0][0] == "a.png"
    assert found[-1][0] == "c.png"
    assert not is_plain(path)


@pytest.mark.skipif(shutil.which("tar") is None, reason="there is no tar")
@pytest.mark.parametrize("format_", ["v7", "oldgnu", "gnu", "ustar", "posix"])
def test_what_tar_itself_writes(tmp_path: Path, format_: str):
    folder = tmp_path / "data"
    (folder / "sub").mkdir(parents=True)
    for name in ("a.png", "sub/b.png", "c.txt"):
        (folder / name).write_bytes(os.urandom(700))
    with (folder / "holes.png").open("wb") as file:
        file.truncate(10**6)
    path = tmp_path / "a.tar"
    subprocess.run(["tar", f"--format={format_}", "-cf", path, "-C", folder, "."], check=True)
    assert len(check(path)) == 4
    if format_ != "v7":  # which has no sparse files
        subprocess.run(["tar", f"--format={format_}", "--sparse", "-cf", path, "-C", folder, "."], check=format_ != "ustar")
        check(path)


def test_every_byte_of_a_header_may_be_damaged(tmp_path: Path):
    """With the checksum as it was, and with one that fits."""
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for name in ("a.png", "b.png", "c.png"):
            add(tar, name, b"x" * 600)
    good = path.read_bytes()
    refused = 0
    for start in (0, 1536):
        for at in range(512):
            for value in (0, ord("8"), ord("1"), 0xFF, ord(" ")):
                data = bytearray(good)
                data[start + at] = value
                path.write_bytes(data)
                refused += isinstance(check(path), str)
                header = data[start : start + 512]
                total = sum(header) - sum(header[148:156]) + 256
                data[start + 148 : start + 156] = f"{total:06o}\0 ".encode()
                path.write_bytes(data)
                check(path)
    assert refused > 1000


@pytest.mark.parametrize("size", [0, 100, 512, 600, 1024, 1536, 2000, 10240])
def test_a_cut_tar(tmp_path: Path, size: int):
    path = write_tar(tmp_path / "a.tar", pairs(0, 8), tarfile.USTAR_FORMAT)
    whole = path.stat().st_size
    for cut in (size, max(0, whole - size)):
        os.truncate(path, cut)
        check(path)
        write_tar(path, pairs(0, 8), tarfile.USTAR_FORMAT)


def test_many_tars_are_indexed_at_once(tmp_path: Path):
    for number in range(20):
        write_tar(tmp_path / f"{number:02d}.tar", pairs(number, number + 1), tarfile.USTAR_FORMAT)
    with mock.patch.object(tar_headers, "_any") as slow:
        source = open_source(str(tmp_path / "*.tar"))
    assert not slow.called
    assert [caption for _, caption in contents(source)] == [f"caption {i}" for i in range(20)]
    (tmp_path / "13.tar").write_bytes(b"no tar")
    with pytest.raises(ValueError, match=r"13.tar of 6 bytes is truncated"):
        open_source(str(tmp_path / "*.tar"))


def test_sums_of_headers_are_exact():
    for header in (bytes(512), b"\xff" * 512, bytes(range(256)) * 2, os.urandom(512)):
        assert tar_headers._sum(header) == sum(header)
