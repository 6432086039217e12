import itertools
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from test_sources import image, write_tar

from maxdiff.data.examples import BadExample, Example
from maxdiff.data.order import example_index
from maxdiff.data.pipeline import BatchPlan, batches, load_batch, prefetch
from maxdiff.data.sources import open_source
from maxdiff.data.transforms import make_picture, random_words
from maxdiff.weights.tokenizer import END, published_tokenizer

TOKENIZERS = [published_tokenizer(END), published_tokenizer("!")]
N = 23
PLAN = BatchPlan(seed=3, global_batch=8, resolution=16, center_crop=False, random_flip=True)


@pytest.fixture(scope="module")
def tars(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tars")
    for shard, start in enumerate(range(0, N, 10)):
        keys = range(start, min(start + 10, N))
        members = {
            f"{i}.{kind}": image(i) if kind == "png" else f"number {i}".encode() for i in keys for kind in ("png", "txt")
        }
        write_tar(folder / f"{shard}.tar", members)
    return str(folder / "*.tar")


def take(tars: str, count: int, plan: BatchPlan = PLAN, **options) -> list[dict[str, np.ndarray]]:
    iterator = batches(open_source(tars), TOKENIZERS, plan, **options)
    try:
        return list(itertools.islice(iterator, count))
    finally:
        iterator.close()  # pyright: ignore


def assert_same(a: list[dict[str, np.ndarray]], b: list[dict[str, np.ndarray]]) -> None:
    assert len(a) == len(b)
    for left, right in zip(a, b, strict=True):
        assert left.keys() == right.keys()
        for name in left:
            assert left[name].dtype == right[name].dtype
            np.testing.assert_array_equal(left[name], right[name], name)


def test_batches_hold_what_order_and_transforms_say(tars: str):
    source = open_source(tars)
    got = take(tars, 6)
    shapes = {name: (array.shape, array.dtype.name) for name, array in got[0].items()}
    assert shapes == {
        "image": ((8, 16, 16, 3), "uint8"), "input_ids": ((8, 77), "int32"), "input_ids_2": ((8, 77), "int32"),
        "position": ((8,), "int32"), "index": ((8,), "int64"), "original_size": ((8, 2), "int32"), "crop": ((8, 2), "int32"),
    }  # fmt: skip
    for step, batch in enumerate(got):
        for row in range(8):
            position = 8 * step + row
            index = int(example_index(3, N, position)[1])
            example = source[index]
            assert (example.texts[0], example.image) == (f"number {index}", image(index))
            expected = make_picture(example.image, "", random_words(3, position, 1), 16, center_crop=False, random_flip=True)
            np.testing.assert_array_equal(batch["image"][row], expected.image)
            assert (batch["index"][row], batch["position"][row]) == (index, row)
            assert tuple(batch["original_size"][row]) == expected.original_size == (8, 9)
            assert tuple(batch["crop"][row]) == expected.crop
            for name, tokenizer in zip(("input_ids", "input_ids_2"), TOKENIZERS, strict=True):
                np.testing.assert_array_equal(batch[name][row], tokenizer(example.texts[0])[0])
    one, _ = load_batch(source, TOKENIZERS[:1], PLAN, 0)
    assert_same([one], [{name: array for name, array in got[0].items() if name != "input_ids_2"}])


def test_the_number_of_workers_changes_nothing_and_a_resume_neither(tars: str):
    whole = take(tars, 9)
    assert_same(take(tars, 9, workers=1), whole)
    assert_same(take(tars, 5, workers=3, start_step=4), whole[4:])
    assert_same(take(tars, 2, start_step=7), whole[7:])


@pytest.mark.parametrize("count", [2, 4])
def test_the_slices_of_processes_make_the_batch(tars: str, count: int):
    whole = take(tars, 3)
    plans = [BatchPlan(**{**vars(PLAN), "process_index": i, "process_count": count}) for i in range(count)]
    parts = [take(tars, 3, plan, workers=i % 2) for i, plan in enumerate(plans)]
    assert_same([{n: np.concatenate([p[step][n] for p in parts]) for n in whole[0]} for step in range(3)], whole)


def with_bad(folder: Path, bad: set[int], n: int = 40) -> str:
    members: dict[str, bytes] = {}
    for i in range(n):
        members |= {f"{i}.png": b"broken" if i in bad else image(i), f"{i}.txt": b"x"}
    return str(write_tar(folder / "bad.tar", members))


@pytest.mark.parametrize("workers", [0, 2])
def test_bad_examples_are_replaced_by_the_next(tmp_path: Path, workers: int, caplog: pytest.LogCaptureFixture):
    tar = with_bad(tmp_path, {3, 4, 39})
    got = take(tar, 10, workers=workers, max_bad_fraction=0.2)  # two epochs
    _, wanted = example_index(3, 40, np.arange(80))
    expected = [{3: 5, 4: 5, 39: 0}.get(i, i) for i in wanted.tolist()]
    assert np.concatenate([batch["index"] for batch in got]).tolist() == expected
    assert "bad.tar:3: its image cannot be decoded (UnidentifiedImageError: " in caplog.text
    assert len(caplog.records) == 3  # each once, also where one stands for several
    assert all(record.levelno == logging.WARNING and record.name == "maxdiff.data.pipeline" for record in caplog.records)


@pytest.mark.parametrize("workers", [0, 2])
def test_too_many_bad_examples_stop_the_run(tmp_path: Path, workers: int):
    tar = with_bad(tmp_path, {3, 20})
    with pytest.raises(
        ValueError, match=r"(\d+) of 104 examples are bad, more than max_bad_fraction=0.04; the last: .*bad.tar:(3|20): "
    ) as caught:
        take(tar, 30, workers=workers, max_bad_fraction=0.04)
    count = int(str(caught.value).split()[0])
    assert count == np.isin(example_index(3, 40, np.arange(104))[1], [3, 20]).sum()
    assert len(take(tar, 30, max_bad_fraction=0.06, workers=workers)) == 30


def test_bad_neighbours_count_once_each(tmp_path: Path):
    """Each example that cannot be had counts for itself, not for those tried in its place."""
    source = open_source(with_bad(tmp_path, set(range(10, 19))))
    met = [load_batch(source, [], BatchPlan(0, 40, 16), step)[1] for step in range(2)]
    assert [len(bad) for bad in met] == [9, 9]


def test_a_source_without_good_examples(tmp_path: Path):
    with pytest.raises(ValueError, match=r"40 examples in a row are bad, the last .*bad.tar:\d+: its image"):
        take(with_bad(tmp_path, set(range(40))), 1, max_bad_fraction=1.0)


def test_wrong_arguments_are_told_at_once(tars: str):
    source = open_source(tars)
    for plan, options, message in [
        (BatchPlan(0, 9, 16, process_count=2), {}, "global_batch=9 does not divide among 2 processes"),
        (BatchPlan(0, 0, 16), {}, "global_batch=0 does not divide"),
        (BatchPlan(0, 8, 0), {}, r"resolution=0 \(allowed: 1 or more\)"),
        (PLAN, {"workers": -1}, r"workers=-1 \(allowed: 0 or more\)"),
        (PLAN, {"start_step": -1}, r"start_step=-1 \(allowed: 0 or more\)"),
        (PLAN, {"max_bad_fraction": 1.5}, r"max_bad_fraction=1.5 \(allowed: 0 to 1\)"),
    ]:
        with pytest.raises(ValueError, match=message):
            batches(source, TOKENIZERS, plan, **options)
    with pytest.raises(ValueError, match=r"3 tokenizers \(allowed: at most 2\)"):
        batches(source, TOKENIZERS[:1] * 3, PLAN)
    # An autoencoder wants no captions.
    assert "input_ids" not in load_batch(source, [], PLAN, 0)[0]


# --- worker processes --------------------------------------------------------------------------------

SPY = """
import os, sys
from maxdiff.data.examples import Example

class Spy:
    def __init__(self, data, fault=""):
        self.data, self.fault = data, fault
    def __len__(self):
        return 10
    def __getitem__(self, i):
        print("this must not get between the batches")
        if self.fault == "die" and i == 7:
            os._exit(3)
        if self.fault == "kill" and i == 7:
            os.kill(os.getpid(), 9)
        if self.fault == "raise" and i == 7:
            raise OSError(5, "disk on fire")
        modules = [name for name in ("jax", "flax", "multiprocessing", "__mp_main__") if name in sys.modules]
        return Example("k", self.data, (f"{os.getpid()} {' '.join(modules)}",))
"""


class Captions:
    """A tokenizer that keeps what it is given."""

    def __call__(self, texts):
        return np.array(texts)


@pytest.fixture
def spy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable:
    (tmp_path / "spy_source.py").write_text(SPY)
    monkeypatch.syspath_prepend(str(tmp_path))
    import spy_source  # pyright: ignore

    return lambda fault="": spy_source.Spy(image(0), fault)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def all_gone(pids: set[int], seconds: float = 10) -> bool:
    end = time.monotonic() + seconds
    while any(map(alive, pids)) and time.monotonic() < end:
        time.sleep(0.05)
    return not any(map(alive, pids))


def test_workers_import_no_jax_ignore_signals_and_end_with_the_iterator(spy: Callable):
    iterator = batches(spy(), [Captions()], PLAN, workers=2)
    texts = {text for batch in itertools.islice(iterator, 6) for text in batch["input_ids"]}
    pids = {int(text.split()[0]) for text in texts}
    assert {" ".join(text.split()[1:]) for text in texts} == {""}
    assert len(pids) == 2
    assert os.getpid() not in pids
    for pid in pids:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            os.kill(pid, number)
    assert {int(t.split()[0]) for batch in itertools.islice(iterator, 4) for t in batch["input_ids"]} == pids
    iterator.close()  # pyright: ignore
    assert not any(map(alive, pids))


@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [("die", ChildProcessError, r"data worker [01] of step [01] ended with exit code 3"),
     ("kill", ChildProcessError, "ended by SIGKILL, perhaps for lack of memory"), ("raise", OSError, "disk on fire")],
)  # fmt: skip
def test_a_failing_worker_is_told(spy: Callable, fault: str, error: type, message: str):
    with pytest.raises(error, match=message) as caught:
        list(itertools.islice(batches(spy(fault), TOKENIZERS, PLAN, workers=2), 4))
    if fault == "raise":
        assert "in __getitem__" in caught.value.__notes__[0]


def test_what_a_worker_cannot_import_is_told(monkeypatch: pytest.MonkeyPatch, spy: Callable):
    source = spy()
    monkeypatch.setattr(sys, "path", [path for path in sys.path if not (Path(path) / "spy_source.py").exists()])
    with pytest.raises(ModuleNotFoundError, match="spy_source"):
        next(batches(source, TOKENIZERS, PLAN, workers=1))


SCRIPT = """
import sys
print("main runs", flush=True)
from maxdiff.data.pipeline import BatchPlan, batches
from maxdiff.data.sources import open_source
from maxdiff.weights.tokenizer import published_tokenizer
import json, pathlib, os, time
it = batches(open_source(sys.argv[1]), [published_tokenizer()], BatchPlan(0, 8, 16), workers=2)
next(it), next(it)
tasks = pathlib.Path(f"/proc/{os.getpid()}/task").glob("*/children")
print(json.dumps([int(pid) for task in tasks for pid in task.read_text().split()]), flush=True)
time.sleep(60)
"""


def test_workers_end_when_the_parent_is_killed(tars: str, tmp_path: Path):
    (tmp_path / "script.py").write_text(SCRIPT)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    parent = subprocess.Popen([sys.executable, str(tmp_path / "script.py"), tars], stdout=subprocess.PIPE, env=env, text=True)
    assert parent.stdout is not None
    assert parent.stdout.readline() == "main runs\n"
    pids = set(json.loads(parent.stdout.readline()))  # the script was not run again: nothing else was printed
    assert len(pids) == 2
    assert all(map(alive, pids))
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert all_gone(pids)


# --- prefetch ----------------------------------------------------------------------------------------


def test_prefetch_keeps_order_and_depth():
    made: list[int] = []

    def items():
        for i in range(10):
            made.append(i)
            yield i

    with prefetch(items(), lambda i: i * i, depth=3) as fetched:
        deadline = time.monotonic() + 5
        while len(made) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.1)
        assert made == [0, 1, 2]
        assert next(fetched) == 0
        assert list(fetched) == [i * i for i in range(1, 10)]
        with pytest.raises(StopIteration):
            next(fetched)
    assert not [t for t in threading.enumerate() if t.name == "maxdiff-prefetch"]


def test_prefetch_measures_waiting():
    def slow():
        for i in range(3):
            time.sleep(0.1)
            yield i

    with prefetch(slow(), lambda i: i) as fetched:
        list(fetched)
        assert 0.25 < fetched.seconds_waited < 2
    with prefetch(iter(range(3)), lambda i: i) as fetched:
        for _ in range(3):
            time.sleep(0.1)
            next(fetched)
        assert fetched.seconds_waited < 0.1


@pytest.mark.parametrize("where", ["iterator", "place"])
def test_prefetch_passes_exceptions_on(where: str):
    def items():
        yield 1
        if where == "iterator":
            raise OSError("lost")
        yield 2

    def place(i: int) -> int:
        if i == 2:
            raise OSError("lost")
        return i

    with prefetch(items(), place) as fetched:
        assert next(fetched) == 1
        for _ in range(2):
            with pytest.raises(OSError, match="lost"):
                next(fetched)
    with pytest.raises(ValueError, match=r"depth=0 \(allowed: 1 or more\)"):
        prefetch(items(), place, 0)


def test_closing_prefetch_ends_workers_and_places_on_devices(spy: Callable):
    import jax

    def place(batch):
        return {**batch, "image": jax.device_put(batch["image"])}

    with prefetch(batches(spy(), [Captions()], PLAN, workers=2), place) as fetched:
        got = [next(fetched) for _ in range(4)]
        assert isinstance(got[0]["image"], jax.Array)
        pids = {int(text.split()[0]) for batch in got for text in batch["input_ids"]}
    assert len(pids) == 2
    assert not any(map(alive, pids))
    with pytest.raises(StopIteration):
        next(fetched)


def test_load_batch_tells_bad_examples_in_order():
    class Half:
        def __len__(self):
            return 4

        def __getitem__(self, i: int) -> Example:
            if i % 2:
                raise BadExample(str(i), "odd")
            return Example(str(i), image(i), ("",))

    batch, bad = load_batch(Half(), TOKENIZERS, BatchPlan(0, 4, 8), 0)
    _, wanted = example_index(0, 4, np.arange(4))
    assert [int(error.key) for error in bad] == [i for i in wanted.tolist() if i % 2]
    assert batch["index"].tolist() == [(i + i % 2) % 4 for i in wanted.tolist()]
