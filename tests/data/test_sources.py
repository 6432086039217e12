import csv
import io
import json
import logging
import os
import pickle
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from maxdiff.data import files, tar_index
from maxdiff.data.examples import BadExample, Columns
from maxdiff.data.paths import expand_braces
from maxdiff.data.sources import open_source


def image(seed: int, kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (8, 9, 3), np.uint8)).save(file, kind)
    return file.getvalue()


def write_tar(path: Path, members: dict[str, bytes], kind: int = tarfile.PAX_FORMAT) -> Path:
    with tarfile.open(path, "w", format=kind) as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def pairs(start: int, stop: int, **extra: bytes) -> dict[str, bytes]:
    members: dict[str, bytes] = {}
    for i in range(start, stop):
        members |= {f"k{i}.png": image(i), f"k{i}.txt": f"caption {i}\n".encode(), **{f"k{i}.{s}": d for s, d in extra.items()}}
    return members


def contents(source) -> list[tuple[bytes, str]]:
    return [(source[i].image, ", ".join(source[i].texts)) for i in range(len(source))]


@pytest.fixture
def scans(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The tars that were scanned."""
    seen: list[Path] = []
    build = tar_index._build
    monkeypatch.setattr(tar_index, "_build", lambda tar: seen.append(tar) or build(tar))
    return seen


# --- tars --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_tars_give_what_tarfile_reads(tmp_path: Path, kind: int):
    members: dict[str, bytes] = {}
    for name in ["a", "dir/a", "b é", "x" * 90, *(["y" * 300] if kind != tarfile.USTAR_FORMAT else [])]:
        members |= {f"{name}.JPG": image(1, "JPEG"), f"{name}.seg.png": b"other", f"{name}.txt": b" two words \n"}
    members["c.d.webp"] = b"not an image of its own"  # key c, kind d.webp
    members["c.webp"], members["c.txt"] = image(2, "WEBP"), "naïve".encode()
    path = write_tar(tmp_path / "a.tar", members, kind)
    source = open_source(path)
    with tarfile.open(path) as tar:
        names = [m.name for m in tar if m.name.endswith((".JPG", "c.webp"))]
        expected = [(tar.extractfile(name).read(), "naïve" if name == "c.webp" else "two words") for name in names]  # pyright: ignore
    assert contents(source) == expected
    assert [source[i].key for i in range(len(source))] == [f"{path}:{name.rsplit('.', 1)[0]}" for name in names]
    with pytest.raises(IndexError):
        source[len(source)]
    with pytest.raises(IndexError):
        source[-1]


def test_many_tars_by_glob_and_braces(tmp_path: Path):
    for i in range(3):
        write_tar(tmp_path / f"s-{i:02d}.tar", pairs(10 * i, 10 * i + i + 1))
    every = contents(open_source(str(tmp_path / "s-{00..02}.tar")))
    assert [caption for _, caption in every] == [f"caption {i}" for i in (0, 10, 11, 20, 21, 22)]
    assert contents(open_source(str(tmp_path / "*.tar"))) == every
    assert contents(open_source(str(tmp_path / "s-{00,0[12]}.tar"))) == every
    assert contents(open_source(tmp_path / "s-01.tar")) == every[1:3]


def test_braces():
    assert expand_braces("a-{008..011}.tar") == ["a-008.tar", "a-009.tar", "a-010.tar", "a-011.tar"]
    assert expand_braces("{8..10}") == ["8", "9", "10"]
    assert expand_braces("{a,b}{1..2}") == ["a1", "a2", "b1", "b2"]
    with pytest.raises(ValueError, match=r"\{x\} is no brace notation \(allowed"):
        expand_braces("{x}")
    with pytest.raises(ValueError, match="counts down"):
        expand_braces("{3..1}")


def test_captions_from_json(tmp_path: Path):
    fields = json.dumps({"label": "a cat", "text": "from json"}).encode()
    both = write_tar(tmp_path / "both.tar", pairs(0, 2, json=fields))
    assert contents(open_source(both, Columns(("label",))))[1][1] == "a cat"
    assert contents(open_source(both))[1][1] == contents(open_source(both, Columns(("txt",))))[1][1] == "caption 1"
    only = write_tar(tmp_path / "only.tar", {"a.png": image(0), "a.json": fields})
    assert contents(open_source(only))[0][1] == "from json"


def test_an_index_is_kept_and_used(tmp_path: Path, scans: list[Path]):
    tar = write_tar(tmp_path / "a.tar", pairs(0, 5))
    first = contents(open_source(tar))
    assert (tmp_path / "a.tar.index").is_file()
    assert contents(open_source(tar)) == first
    assert scans == [tar]
    cache = tmp_path / "cache" / "deep"
    (tmp_path / "other").mkdir()
    other = write_tar(tmp_path / "other" / "a.tar", pairs(5, 7))
    for _ in range(2):
        assert contents(open_source(tar, cache_dir=cache)) == first
        assert len(open_source(other, cache_dir=str(cache))) == 2
    assert scans == [tar, tar, other]
    assert len(list(cache.iterdir())) == 2
    assert not (tmp_path / "other" / "a.tar.index").exists()


def test_a_stale_index_is_made_anew(tmp_path: Path, scans: list[Path]):
    tar = write_tar(tmp_path / "a.tar", pairs(0, 5))
    open_source(tar)
    stat = tar.stat()
    write_tar(tar, pairs(0, 30))
    os.utime(tar, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # another size
    assert len(open_source(tar)) == 30
    write_tar(tar, pairs(1, 31))
    os.utime(tar, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))  # the same size
    assert contents(open_source(tar))[0] == (image(1), "caption 1")
    assert len(scans) == 3
    open_source(tar)
    assert len(scans) == 3


def test_a_damaged_index_is_made_anew(tmp_path: Path, scans: list[Path], caplog: pytest.LogCaptureFixture):
    tar = write_tar(tmp_path / "a.tar", pairs(0, 5))
    expected = contents(open_source(tar))
    index = tmp_path / "a.tar.index"
    good = index.read_bytes()
    head = good.index(b"\n")
    damaged = [b"", b"\n", b"[]\n", b"null\n", b"{}\n", good[:-1], good[: head + 50], good + b"x"]
    damaged += [good.replace(b'"examples": 5', b'"examples": 4')]
    for at in [3, head // 2, head - 2, head, head + 1, head + 60, len(good) - 1]:
        damaged.append(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
    for data in damaged:
        index.write_bytes(data)
        scans.clear(), caplog.clear()
        assert contents(open_source(tar)) == expected
        assert scans == [tar], data
        assert "is damaged: indexing" in caplog.text
        assert index.read_bytes() == good


def test_where_an_index_cannot_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    tar = write_tar(tmp_path / "a.tar", pairs(0, 3))
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"dataset_save_location='.*file' cannot be written to"):
        open_source(tar, cache_dir=tmp_path / "file")

    def refuse(path, chunks):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(tar_index, "write_atomically", refuse)
    assert len(open_source(tar)) == 3
    assert "set dataset_save_location" in caplog.text


def test_reads_from_threads_forks_and_pickles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(files, "MAX_OPEN", 2)
    for i in range(4):
        write_tar(tmp_path / f"{i}.tar", pairs(20 * i, 20 * i + 20))
    source = open_source(str(tmp_path / "*.tar"))
    expected = [f"caption {i}" for i in range(80)]
    with ThreadPoolExecutor(8) as pool:
        for got in pool.map(lambda _: [source[i].texts[0] for i in np.random.permutation(80)], range(20)):
            assert sorted(got) == sorted(expected)
    assert len(source._files._handles) == 2
    copy = pickle.loads(pickle.dumps(source))
    assert copy._files._handles == {}
    assert contents(copy) == contents(source)
    before = len(os.listdir("/proc/self/fd"))
    del copy
    assert len(os.listdir("/proc/self/fd")) == before - 2


def test_a_tar_cut_during_the_run_is_told(tmp_path: Path):
    tar = write_tar(tmp_path / "a.tar", pairs(0, 5))
    source = open_source(tar)
    os.truncate(tar, 3000)
    with pytest.raises(BadExample, match=r"a.tar ends before byte \d+, where its index has an example end"):
        contents(source)


def test_keys_without_image_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    tar = write_tar(tmp_path / "a.tar", {**pairs(0, 2), "README.md": b"x", "note.txt": b"y", "z.tiff": b"z", ".hidden": b""})
    assert len(open_source(tar)) == 2
    assert "3 of 5 keys have no image (.jpg, .jpeg, .png, .webp, .gif, .bmp) and are left out, first README" in caplog.text


@pytest.mark.parametrize("cut", [512, 1024, 100, 700, 1200, -1024, -1500, "member"])
def test_a_truncated_tar(tmp_path: Path, cut):
    tar = write_tar(tmp_path / "a.tar", pairs(0, 5))
    with tarfile.open(tar) as file:
        last = file.getmembers()[-1]
    end = last.offset_data + 512  # of the last member with its padding
    size = end if cut == "member" else cut if cut > 0 else end + cut
    os.truncate(tar, size)
    with pytest.raises(ValueError, match=rf"a.tar of {size} bytes is truncated or no uncompressed tar"):
        open_source(tar)
    assert not (tmp_path / "a.tar.index").exists()


def test_a_tar_with_garbage_inside(tmp_path: Path):
    tar = write_tar(tmp_path / "a.tar", pairs(0, 5))
    with tarfile.open(tar) as file:
        offset = file.getmembers()[4].offset
    data = bytearray(tar.read_bytes())
    data[offset : offset + 512] = b"\xff" * 512
    tar.write_bytes(data)
    with pytest.raises(ValueError, match=f"no member and no end of the archive at byte {offset}"):
        open_source(tar)


FAULTS = {
    "empty shard": ({}, "text", "is an empty shard: none of its 0 keys"),
    "no images": ({"a.txt": b"x"}, "text", "is an empty shard: none of its 1 keys has an image"),
    "no caption": ({**pairs(0, 2), "lone.png": image(0)}, "text", r"a.tar: lone has no caption: it has no .txt and no .json"),
    "no json": (pairs(0, 2), "label", r"a.tar: k0 has no caption: it has no .json \(caption_column='label'\)"),
    "no field": (pairs(0, 2, json=b'{"b": 1, "a": ""}'), "label", r"no caption_column='label' \(allowed: \['a', 'b'\]\)"),
    "no text": (pairs(0, 2, json=b'{"label": ["x"]}'), "label", r"caption_column='label' holds \['x'\], not a text"),
    "no dict": (pairs(0, 2, json=b"[]"), "label", r"holds a list, not fields"),
    "two images": ({**pairs(0, 2), "k0.jpg": b""}, "text", "k0 has two members of kind image, the second k0.jpg"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_of_tars(tmp_path: Path, name: str):
    members, column, message = FAULTS[name]
    with pytest.raises(ValueError, match=message):
        open_source(write_tar(tmp_path / "a.tar", members), Columns((column,)))


def test_paths_that_name_nothing(tmp_path: Path):
    write_tar(tmp_path / "s-0.tar", pairs(0, 1))
    with pytest.raises(FileNotFoundError, match=r"nothing matches .*nowhere: a path names"):
        open_source(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"nothing matches .*s-1.tar \(of path='.*s-\{0..1\}.tar'\)"):
        open_source(str(tmp_path / "s-{0..1}.tar"))
    with pytest.raises(ValueError, match=r"s-0.tar more than once"):
        open_source(str(tmp_path / "s-{0,[0]}.tar"))
    (tmp_path / "s.tar.gz").write_bytes(b"")
    with pytest.raises(ValueError, match=r"s.tar.gz, which is not a tar \(allowed: uncompressed .tar"):
        open_source(tmp_path / "s.tar.gz")
    with pytest.raises(ValueError, match=r"holds tars, .*name those to use"):
        open_source(tmp_path)


def test_single_bad_captions_do_not_stop_a_source(tmp_path: Path):
    good = {**pairs(0, 1), "k0.json": b'{"label": "x"}'}
    bad = {"b.png": image(1), "b.txt": b"\xff", "b.json": b"{"}
    tar = write_tar(tmp_path / "a.tar", {**good, **bad})
    with pytest.raises(BadExample, match="a.tar:b: its caption is not UTF-8"):
        open_source(tar)[1]
    with pytest.raises(BadExample, match="a.tar:b: its .json is no JSON"):
        open_source(tar, Columns(("label",)))[1]
    error = pickle.loads(pickle.dumps(BadExample("k", "r")))  # it travels between processes
    assert (error.key, error.reason, str(error)) == ("k", "r", "k: r")


# --- folders -----------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "sub").mkdir()
    for i, name in enumerate(["b.png", "sub/a.PNG", "c.png"]):
        (tmp_path / name).write_bytes(image(i))
    return tmp_path


ROWS = [("c.png", 'three, "quoted"'), ("sub/a.PNG", "two ü")]


def write_metadata(folder: Path, kind: str, column: str = "text") -> None:
    if kind == "jsonl":
        lines = [json.dumps({"file_name": name, column: text, "n": 1}) for name, text in ROWS]
        (folder / "metadata.jsonl").write_text("\n".join([*lines, "", ""]), encoding="utf-8")
    else:
        with (folder / "metadata.csv").open("w", newline="", encoding="utf-8-sig") as file:
            csv.writer(file).writerows([("file_name", column), *ROWS])


@pytest.mark.parametrize("kind", ["jsonl", "csv"])
@pytest.mark.parametrize("column", ["text", "caption"])
def test_a_folder_with_metadata(folder: Path, kind: str, column: str):
    write_metadata(folder, kind, column)
    source = open_source(folder, Columns((column,)))
    assert contents(source) == [(image(2), 'three, "quoted"'), (image(1), "two ü")]
    assert source[0].key == str(folder / "c.png")
    assert contents(pickle.loads(pickle.dumps(source))) == contents(source)
    with pytest.raises(
        ValueError, match=rf"metadata.{kind}, line \d: no caption_column='other' \(allowed: \['{min(column, 'file_name')}'"
    ):
        open_source(folder, Columns(("other",)))


def test_a_folder_with_text_files(folder: Path):
    for name in ["b", "c", "sub/a"]:
        (folder / f"{name}.txt").write_text(f"text of {name}\n")
    source = open_source(str(folder))
    assert contents(source) == [(image(0), "text of b"), (image(2), "text of c"), (image(1), "text of sub/a")]
    with pytest.raises(IndexError):
        source[3]
    with pytest.raises(ValueError, match=r"caption_column='label': .* has neither metadata.jsonl nor metadata.csv"):
        open_source(folder, Columns(("label",)))
    (folder / "b.txt").write_bytes(b"\xff")
    with pytest.raises(BadExample, match="b.png: its caption is not UTF-8"):
        source[0]
    (folder / "c.txt").unlink()
    with pytest.raises(ValueError, match=r"c.png has no caption: neither .* nor c.txt beside the image"):
        open_source(folder)


METADATA_FAULTS = {
    "both": ({"metadata.jsonl": "{}", "metadata.csv": "a"}, ValueError, "has both metadata.jsonl and metadata.csv: keep one"),
    "empty": ({"metadata.jsonl": "\n"}, ValueError, "metadata.jsonl names no images"),
    "no json": ({"metadata.jsonl": "\n{"}, ValueError, "metadata.jsonl, line 2 is no JSON"),
    "no object": ({"metadata.jsonl": "3"}, ValueError, "line 1: no column 'file_name' .*int"),
    "no file_name": ({"metadata.csv": "file,text\nb.png,x"}, ValueError, r"line 2: no column 'file_name' \(allowed: \['file', 'text'\]\)"),
    "missing": ({"metadata.csv": "file_name,text\nb.png,x\nno.png,y"}, FileNotFoundError, r"no.png is not there, which metadata.csv names \(1 of 2"),
    "null": ({"metadata.jsonl": '{"file_name": "b.png", "text": null}'}, ValueError, "'text' holds None, not a text"),
    "comma": ({"metadata.csv": "file_name,text\nb.png,one, two"}, ValueError, "line 2 has more fields than the header: .*double quotes"),
    "short": ({"metadata.csv": "file_name,text\nb.png"}, ValueError, "'text' holds None"),
    "encoding": ({"metadata.csv": "file_name,text\nb.png,\udcff"}, ValueError, "metadata.csv cannot be read: .*utf-8"),
}  # fmt: skip


@pytest.mark.parametrize("name", METADATA_FAULTS)
def test_faults_of_metadata(folder: Path, name: str):
    wrong, error, message = METADATA_FAULTS[name]
    for file, text in wrong.items():
        (folder / file).write_text(text, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(error, match=message):
        open_source(folder)


def test_a_folder_without_images(tmp_path: Path):
    with pytest.raises(ValueError, match=r"names no images \(.jpg"):
        open_source(tmp_path)


def test_loggers_are_quiet_on_good_data(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO):
        open_source(write_tar(tmp_path / "a.tar", pairs(0, 2)))
    assert not caplog.records
