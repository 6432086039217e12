"""Tables, parquet, Hugging Face datasets and ArrayRecord: each as the others, and each one's faults."""

import csv
import json
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from array_record.python.array_record_module import ArrayRecordWriter
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from maxdiff.data import parquet
from maxdiff.data.arrayrecord import parse_example
from maxdiff.data.examples import BadExample, Columns, Filter
from maxdiff.data.hf import open_hf
from maxdiff.data.paths import kind_of
from maxdiff.data.rows import Recent
from maxdiff.data.sources import Format, open_source
from tests.data.test_sources import contents, image

ROWS = [{"image": image(i), "text": f"caption {i}", "size": 100 * i} for i in range(10)]
EXPECTED = [(row["image"], row["text"]) for row in ROWS]


# --- Files of each kind ------------------------------------------------------------------------------------------


def write_parquet(path: Path, rows: list[dict[str, Any]], schema: pa.Schema | None = None) -> Path:
    pq.write_table(pa.Table.from_pylist(rows, schema), path, row_group_size=4, write_page_checksum=True)
    return path


def write_table(path: Path, rows: list[dict[str, Any]], column: str = "image") -> Path:
    """The rows in a .csv or .jsonl, their images in files below its folder."""
    (path.parent / "images").mkdir(exist_ok=True)
    named = []
    for row in rows:
        name = f"images/{row['text']}.png"
        (path.parent / name).write_bytes(row["image"])
        named.append({**{key: value for key, value in row.items() if key != "image"}, column: name})
    with path.open("w", newline="") as file:
        if path.suffix == ".csv":
            writer = csv.DictWriter(file, named[0])
            writer.writeheader()
            writer.writerows(named)
        else:
            file.write("\n".join(map(json.dumps, named)))
    return path


def write_saved(path: Path, rows: list[dict[str, Any]], feature: Any = None) -> Path:
    features = {"image": feature or datasets.Image(), "text": datasets.Value("string"), "size": datasets.Value("int64")}
    datasets.Dataset.from_list(rows, datasets.Features(features)).save_to_disk(path)
    return path


def example_class() -> Any:
    """tf.train.Example, by protobuf itself."""
    file = descriptor_pb2.FileDescriptorProto(name="example.proto", package="t", syntax="proto3")
    kinds = descriptor_pb2.FieldDescriptorProto

    def message(name: str, *fields: tuple[str, int, int, bool, str]) -> Any:
        made = file.message_type.add(name=name)
        for field, number, kind, repeated, of in fields:
            label = kinds.LABEL_REPEATED if repeated else kinds.LABEL_OPTIONAL
            made.field.add(name=field, number=number, type=kind, label=label, type_name=of or None)  # pyright: ignore
        return made

    for name, kind in (("Bytes", kinds.TYPE_BYTES), ("Float", kinds.TYPE_FLOAT), ("Int64", kinds.TYPE_INT64)):
        message(f"{name}List", ("value", 1, kind, True, ""))
    message(
        "Feature",
        *(
            (f"{k.lower()}_list", i + 1, kinds.TYPE_MESSAGE, False, f".t.{k}List")
            for i, k in enumerate(("Bytes", "Float", "Int64"))
        ),
    )
    features = message("Features", ("feature", 1, kinds.TYPE_MESSAGE, True, ".t.Features.FeatureEntry"))
    entry = features.nested_type.add(name="FeatureEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, type=kinds.TYPE_STRING, label=kinds.LABEL_OPTIONAL)
    entry.field.add(name="value", number=2, type=kinds.TYPE_MESSAGE, label=kinds.LABEL_OPTIONAL, type_name=".t.Feature")
    message("Example", ("features", 1, kinds.TYPE_MESSAGE, False, ".t.Features"))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("t.Example"))


EXAMPLE = example_class()


def serialised(row: dict[str, Any]) -> bytes:
    example = EXAMPLE()
    for name, value in row.items():
        values = value if isinstance(value, list) else [value]
        feature = example.features.feature[name]
        if values and isinstance(values[0], int):
            feature.int64_list.value.extend(values)
        elif values and isinstance(values[0], float):
            feature.float_list.value.extend(values)
        else:
            feature.bytes_list.value.extend(v.encode() if isinstance(v, str) else v for v in values)
    return example.SerializeToString()


def write_records(path: Path, records: list[bytes]) -> Path:
    writer = ArrayRecordWriter(str(path), "group_size:1")
    for record in records:
        writer.write(record)
    writer.close()
    return path


def write_array(path: Path, rows: list[dict[str, Any]]) -> Path:
    return write_records(path, [serialised(row) for row in rows])


WRITERS: dict[str, tuple[Callable[[Path, list[dict[str, Any]]], Path], str]] = {
    "parquet": (write_parquet, "a.parquet"),
    "csv": (write_table, "a.csv"),
    "jsonl": (write_table, "a.jsonl"),
    "hf": (write_saved, "saved"),
    "arrayrecord": (write_array, "a.array_record-00000-of-00001"),
}


@pytest.fixture(params=WRITERS)
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    writer, name = WRITERS[request.param]
    return writer(tmp_path / name, ROWS)


# --- Every kind --------------------------------------------------------------------------------------------------


def test_every_kind_gives_its_rows(path: Path):
    source = open_source(path)
    assert contents(source) == EXPECTED
    assert len({source[i].key for i in range(10)}) == 10
    for i in (-1, 10):
        with pytest.raises(IndexError):
            source[i]
        with pytest.raises(IndexError):
            source.fields(i)
    assert contents(pickle.loads(pickle.dumps(source))) == EXPECTED
    with ThreadPoolExecutor(8) as pool:
        for got in pool.map(lambda _: contents(source), range(16)):
            assert got == EXPECTED


def test_every_kind_has_fields_without_images(path: Path, tmp_path: Path):
    source = open_source(path)
    fields = source.fields(3)
    assert str(fields["size"]) == "300"
    assert fields["text"] == "caption 3"
    assert not any(isinstance(value, bytes | dict) for value in fields.values())
    kept = open_source(path, None, tmp_path / "cache", [Filter("size", ">=700")])
    assert contents(kept) == EXPECTED[7:]
    with pytest.raises(ValueError, match="filters: none of 10 examples meets size >1000"):
        open_source(path, None, None, [Filter("size", ">1000")])


def test_every_kind_has_a_fingerprint(path: Path, request: pytest.FixtureRequest, tmp_path: Path):
    writer, name = WRITERS[request.node.callspec.params["path"]]
    first = open_source(path).fingerprint()
    assert open_source(path).fingerprint() == first
    for folder in ("b", "c"):
        (tmp_path / folder).mkdir()
    assert open_source(writer(tmp_path / "c" / name, ROWS[:-1])).fingerprint() != first
    if name != "saved":  # where a dataset's rows come from is part of datasets' own fingerprint
        assert open_source(writer(tmp_path / "b" / name, ROWS)).fingerprint() == first


def test_every_kind_says_which_columns_are_missing(path: Path):
    with pytest.raises(ValueError, match=r"'label'.*\(allowed: \[.*'size', 'text'\]\)"):
        open_source(path, Columns(("label",)))
    # Tables say so too, where they have no file_name either.
    with pytest.raises(ValueError, match=r"'picture'.*\(allowed: \[.*'size', 'text'\]\)"):
        open_source(path, form=Format(image_column="picture"))


@pytest.mark.parametrize(
    ("kind", "package", "extra"),
    [("parquet", "pyarrow.parquet", "parquet"), ("hf", "datasets", "hf"),
     ("arrayrecord", "array_record.python.array_record_data_source", "arrayrecord")],
)  # fmt: skip
def test_a_missing_package_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, package: str, extra: str
):
    writer, name = WRITERS[kind]
    path = writer(tmp_path / name, ROWS)
    monkeypatch.setitem(__import__("sys").modules, package, None)
    with pytest.raises(ValueError, match=rf"{name} needs {package.partition('.')[0]} .*: pip install 'maxdiff\[{extra}\]'$"):
        open_source(path)


def test_kinds_go_by_name_and_by_dataset_type(tmp_path: Path):
    assert [kind_of(name) for name in ("a.tar", "a.parquet", "a.csv", "b.jsonl", "a.arrayrecord", "a.array_record-00001-of-00002", "x")] == [
        "webdataset", "parquet", "table", "table", "arrayrecord", "arrayrecord", "webdataset",
    ]  # fmt: skip
    write_parquet(tmp_path / "part-0", ROWS[:3])
    with pytest.raises(ValueError, match=r"part-0, which is not a tar \(allowed"):
        open_source(tmp_path / "part-0")
    assert contents(open_source(tmp_path / "part-0", form=Format("parquet"))) == EXPECTED[:3]
    with pytest.raises(ValueError, match=r"dataset_type='folder': .*part-0 is no folder"):
        open_source(tmp_path / "part-0", form=Format("folder"))
    with pytest.raises(ValueError, match=r"dataset_type='parquet': .* is a folder; name the files in it"):
        open_source(tmp_path, form=Format("parquet"))
    write_parquet(tmp_path / "a.parquet", ROWS)
    with pytest.raises(ValueError, match=r"holds no images: name the files to use, as .*a.parquet"):
        open_source(tmp_path)
    write_table(tmp_path / "z.csv", ROWS)
    with pytest.raises(ValueError, match=r"names .*z.csv, which is not a parquet file \(allowed: .parquet"):
        open_source(str(tmp_path / "{a.parquet,z.csv}"))


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "arrayrecord"])
def test_many_files_are_one_source(tmp_path: Path, kind: str):
    writer, name = WRITERS[kind]
    for number, part in enumerate((ROWS[:3], ROWS[3:4], ROWS[4:])):
        (tmp_path / f"{number}").mkdir()
        writer(tmp_path / f"{number}" / name, part)
    assert contents(open_source(str(tmp_path / "*" / name))) == EXPECTED
    assert contents(open_source(str(tmp_path / "{2,0}" / name))) == EXPECTED[4:] + EXPECTED[:3]


# --- Tables ------------------------------------------------------------------------------------------------------


def test_tables_know_file_name_too(tmp_path: Path):
    assert contents(open_source(write_table(tmp_path / "a.csv", ROWS, "file_name"))) == EXPECTED
    assert contents(open_source(write_table(tmp_path / "b.csv", ROWS, "p"), form=Format(image_column="p"))) == EXPECTED


def test_faults_of_tables(tmp_path: Path):
    path = write_table(tmp_path / "a.jsonl", ROWS)
    (tmp_path / "images" / "caption 4.png").unlink()
    with pytest.raises(FileNotFoundError, match=r"images/caption 4.png is not there, which a.jsonl names \(1 of 10"):
        open_source(path)
    path.write_text("")
    with pytest.raises(ValueError, match=r"a.jsonl is empty"):
        open_source(path)


# --- Parquet -----------------------------------------------------------------------------------------------------


def test_parquet_images_in_structs_and_in_files(tmp_path: Path):
    for i, row in enumerate(ROWS):
        (tmp_path / f"{i}.png").write_bytes(row["image"])
    structs = [{**row, "image": {"bytes": row["image"], "path": None}} for row in ROWS[:5]]
    structs += [{**row, "image": {"bytes": None, "path": f"{i + 5}.png"}} for i, row in enumerate(ROWS[5:])]
    assert contents(open_source(write_parquet(tmp_path / "structs.parquet", structs))) == EXPECTED
    paths = [{**row, "image": f"{i}.png"} for i, row in enumerate(ROWS)]
    source = open_source(write_parquet(tmp_path / "paths.parquet", paths))
    assert contents(source) == EXPECTED
    (tmp_path / "3.png").unlink()
    with pytest.raises(BadExample, match=r"paths.parquet:0:3: image_column='image': .*3.png"):
        source[3]
    nothing = open_source(write_parquet(tmp_path / "none.parquet", [*ROWS[:1], {"image": None, "text": "x"}]))
    with pytest.raises(
        BadExample, match=r"none.parquet:0:1: image_column='image' holds None, neither an image file nor its path"
    ):
        nothing[1]


def test_parquet_reads_row_groups_once_and_drops_the_oldest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    source: Any = open_source(write_parquet(tmp_path / "a.parquet", ROWS))
    made: list[Any] = []
    decode = source._decode
    monkeypatch.setattr(source, "_decode", lambda key: made.append(key) or decode(key))
    source._decoded = source._make_recent()
    for i in [*range(10), *range(10)]:
        source[i]
    assert made == [(0, True), (1, True), (2, True)]
    assert set(decode((0, True)).column_names) == {"image", "text"}
    assert set(decode((0, False)).column_names) == {"text", "size"}
    monkeypatch.setattr(parquet, "MAX_DECODED", 1)
    source._decoded, made[:] = source._make_recent(), []
    for i in (0, 1, 4, 5, 0):
        source[i]
    assert made == [(0, True), (1, True), (0, True)]


def test_recent_is_bounded():
    recent = Recent(lambda key: bytes(key), len, 100)
    for key in (40, 41, 40, 50, 40, 60):
        assert len(recent.get(key)) == key
        assert recent._bytes == sum(map(len, recent._kept.values())) <= 100
    assert list(recent._kept) == [40, 60]
    assert len(recent.get(500)) == 500  # larger than the limit, and alone
    assert list(recent._kept) == [500]


def test_faults_of_parquet(tmp_path: Path):
    path = write_parquet(tmp_path / "a.parquet", ROWS)
    good = path.read_bytes()
    source = open_source(path)
    with pq.ParquetFile(path) as file:
        chunk = file.metadata.row_group(1).column(0)
    at = chunk.dictionary_page_offset + chunk.total_compressed_size // 2
    path.write_bytes(good[:at] + bytes([good[at] ^ 255]) + good[at + 1 :])
    assert source[0].texts == ("caption 0",)
    with pytest.raises(ValueError, match=r"a.parquet: row group 1 cannot be read"):
        source[4]
    for damaged in (good[:-100], b"", b"PAR1" * 5):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=rf"a.parquet of {len(damaged)} bytes is truncated or no parquet file"):
            open_source(path)
    schema = pa.schema({"image": pa.binary(), "text": pa.string()})
    with pytest.raises(ValueError, match=r"a.parquet is empty: it has no rows"):
        open_source(write_parquet(path, [], schema))
    numbers = [{"image": 3, "text": "x"}]
    with pytest.raises(ValueError, match=r"image_column='image' is of type int64 \(allowed: bytes"):
        open_source(write_parquet(path, numbers))
    no_text = [{"image": b"", "text": 3.5}]
    with pytest.raises(BadExample, match=r"caption_column='text' holds 3.5, not a text"):
        open_source(write_parquet(path, no_text))[0]


# --- Hugging Face ------------------------------------------------------------------------------------------------


def test_splits_of_a_saved_dataset(tmp_path: Path):
    for name, rows in (("train", ROWS[:6]), ("test", ROWS[6:])):
        write_saved(tmp_path / "d" / name, rows)
    (tmp_path / "d" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert contents(open_source(tmp_path / "d")) == EXPECTED[:6]
    assert contents(open_source(tmp_path / "d", form=Format(split="test"))) == EXPECTED[6:]
    assert contents(open_source(tmp_path / "d" / "test")) == EXPECTED[6:]
    with pytest.raises(ValueError, match=r"has no train_split='validation' \(allowed: \['test', 'train'\]\)"):
        open_source(tmp_path / "d", form=Format(split="validation"))


def test_datasets_that_are_loaded_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ValueError, match=r"nobody/nothing with train_split='train' cannot be loaded"):
        open_source("nobody/nothing", form=Format("hf"))
    asked = []
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: asked.append((a, k)) or datasets.Dataset.from_list(ROWS))
    assert contents(open_source("some/name", None, tmp_path, form=Format("hf", split="train[:9]"))) == EXPECTED
    assert asked == [(("some/name",), {"split": "train[:9]", "cache_dir": str(tmp_path)})]
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: datasets.Dataset.from_list(ROWS).select([]))
    with pytest.raises(ValueError, match="some/name is empty: it has no rows"):
        open_source("some/name", form=Format("hf"))


def test_other_features_of_datasets(tmp_path: Path):
    assert contents(open_source(write_saved(tmp_path / "bytes", ROWS, datasets.Value("binary")))) == EXPECTED
    (tmp_path / "a.png").write_bytes(image(0))
    named = [{**ROWS[0], "image": str(tmp_path / "a.png")}]
    assert contents(open_source(write_saved(tmp_path / "paths", named, datasets.Value("string")))) == EXPECTED[:1]
    features = datasets.Features({"image": datasets.Image(), "text": datasets.ClassLabel(names=["a", "b"])})
    datasets.Dataset.from_list([{"image": image(0), "text": 1}], features).save_to_disk(tmp_path / "classes")
    labelled = open_hf(str(tmp_path / "classes"), Columns(("text",), {"0": "an a", "1": "a b"}), "image", "train")
    assert labelled[0].texts == ("a b",)


# --- ArrayRecord -------------------------------------------------------------------------------------------------


def test_examples_are_parsed_as_protobuf_writes_them():
    row = {
        "a": b"\xff\x00",
        "none": [],
        "two": [b"x", b""],
        "f": 1.5,
        "fs": [0.0, -2.5],
        "i": -3,
        "is": [0, 2**62, -(2**63)],
        "é": "ü",
    }
    parsed = parse_example(serialised(row))
    assert parsed == {**row, "é": "ü".encode()}
    assert parse_example(b"") == {}
    # Numbers that are not packed, as older writers have them.
    unpacked = b"\x0a\x11\x0a\x0f\x0a\x01i\x12\x0a\x1a\x08\x08\x05\x08\x06\x08\x07\x08\x08"
    assert parse_example(unpacked) == {"i": [5, 6, 7, 8]}
    whole = serialised(ROWS[0])
    for size in range(1, 12):
        with pytest.raises(ValueError, match="ends"):
            parse_example(whole[:-size])


def test_faults_of_array_records(tmp_path: Path):
    records = [serialised(row) for row in ROWS]
    path = write_records(
        tmp_path / "a.arrayrecord", [*records[:2], b"\xff\xff", serialised({"text": "x"}), serialised({"image": b"i"})]
    )
    source = open_source(path)
    assert source[1].texts == ("caption 1",)
    for i, message in (
        (2, "cannot be read as a tf.train.Example"),
        (3, "no image_column='image'"),
        (4, "no caption_column='text'"),
    ):
        with pytest.raises(BadExample, match=rf"a.arrayrecord:{i}: {message}"):
            source[i]
    whole = path.read_bytes()
    for damaged in (whole[:-100], b"", b"x" * 1000):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"a.arrayrecord: truncated, or no ArrayRecord file|a.arrayrecord is empty"):
            open_source(path)
    with pytest.raises(ValueError, match=r"a.arrayrecord is empty: it has no records"):
        open_source(write_records(path, []))
