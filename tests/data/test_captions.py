"""Captions by position, columns, classes and filters."""

import json
import pickle
import re
from pathlib import Path

import numpy as np
import pytest

from maxdiff.data.buckets import image_sizes
from maxdiff.data.captions import CaptionPlan
from maxdiff.data.examples import BadExample, Columns, Filter, LostExample
from maxdiff.data.sources import filtered, open_source
from maxdiff.data.transforms import CAPTION, random_words
from tests.data.test_sources import image, write_tar


def captions(plan: CaptionPlan, texts: tuple[str, ...], count: int = 400) -> list[str]:
    return [plan.caption(texts, random_words(0, position, CAPTION)) for position in range(count)]


def test_one_of_several_texts_is_chosen_another_each_time():
    chosen = captions(CaptionPlan(prefix="photo: "), ("a cat", "an animal"))
    assert set(chosen) == {"photo: a cat", "photo: an animal"}
    assert 150 < chosen.count("photo: a cat") < 250
    assert chosen == captions(CaptionPlan(prefix="photo: "), ("a cat", "an animal"))
    assert captions(CaptionPlan(), ("a cat",), 1) == ["a cat"]


def test_texts_are_joined():
    assert captions(CaptionPlan("join", " | "), ("a cat", "", "grey"), 1) == ["a cat | grey"]


def test_tags_are_shuffled_behind_those_that_stay():
    made = captions(CaptionPlan(shuffle_tags=True, keep_tags=1), ("me, a, b,c",))
    assert {caption.split(", ")[0] for caption in made} == {"me"}
    orders = {caption: made.count(caption) for caption in made}
    assert sorted(orders) == ["me, a, b, c", "me, a, c, b", "me, b, a, c", "me, b, c, a", "me, c, a, b", "me, c, b, a"]
    assert min(orders.values()) > 400 / 6 / 2


def test_tags_are_left_out_and_those_that_stay_keep_their_order():
    made = [caption.split(", ") for caption in captions(CaptionPlan(tag_dropout=0.25, keep_tags=1), ("me, a, b, c",))]
    assert all(tags == sorted(tags, key="meabc".find) and tags[0] == "me" for tags in made)
    assert 0.65 < np.mean([len(tags) - 1 for tags in made]) / 3 < 0.85


def test_columns_and_classes(tmp_path: Path):
    members = {}
    for i in range(3):
        fields = {"title": f"title {i}", "tags": None if i == 1 else "x, y", "label": i}
        members |= {f"k{i}.png": image(i), f"k{i}.json": json.dumps(fields).encode(), f"k{i}.cls": str(i).encode()}
    tar = write_tar(tmp_path / "a.tar", members)
    source = open_source(tar, Columns(("title", "tags")))
    assert [source[i].texts for i in range(3)] == [("title 0", "x, y"), ("title 1",), ("title 2", "x, y")]
    labels = {"0": "a cat", "1": "a dog"}
    for column in ("cls", "label"):
        source = open_source(tar, Columns((column,), labels))
        assert [source[i].texts for i in range(2)] == [("a cat",), ("a dog",)]
        with pytest.raises(BadExample, match=rf"k2: caption_column='{column}' holds '?2'?, which idx_to_prompt has not"):
            source[2]


def test_filters_keep_what_meets_them_all(tmp_path: Path):
    members = {}
    for i in range(20):
        fields = {"text": str(i), "width": 100 * i, "pwatermark": i / 20, "kind": "photo" if i % 2 else "drawing"}
        members |= {f"k{i:02d}.png": image(i), f"k{i:02d}.json": json.dumps(fields if i != 7 else {"text": "7"}).encode()}
    tar, cache = write_tar(tmp_path / "a.tar", members), tmp_path / "cache"
    cache.mkdir()
    filters = [Filter("pwatermark", "<=0.5"), Filter("width", ">=300"), Filter("kind", "==photo")]
    for _ in range(2):  # the second time from the cache
        source = open_source(tar, cache_dir=cache, filters=filters)
        assert [source[i].texts for i in range(len(source))] == [("3",), ("5",), ("9",)]
    assert len(list(cache.glob("*.rows"))) == 1
    assert source.fingerprint() != open_source(tar, cache_dir=cache).fingerprint()
    with pytest.raises(ValueError, match="filters: none of 20 examples meets width >1e9"):
        open_source(tar, filters=[Filter("width", ">1e9")])
    with pytest.raises(ValueError, match=re.escape("filters: width: '512' is no condition (allowed: one of <=, >=")):
        Filter("width", "512")
    with pytest.raises(
        ValueError, match=re.escape("filters: date: '>=2020-03-01' compares with '2020-03-01' (allowed: a number)")
    ):
        Filter("date", ">=2020-03-01")
    assert [Filter("kind", "<1").keeps({"kind": "a"}), Filter("kind", "!=b").keeps({"kind": "a"})] == [False, True]


@pytest.mark.parametrize("wanted", ["true", "True", "1"])
@pytest.mark.parametrize("value", [True, "true", "True", 1])
def test_truth_is_compared_however_it_is_spelled(value: object, wanted: str):
    assert Filter("nsfw", f"=={wanted}").keeps({"nsfw": value})
    assert not Filter("nsfw", f"!={wanted}").keeps({"nsfw": value})
    assert Filter("nsfw", f"!={wanted}").keeps({"nsfw": False})


def test_a_fingerprint_is_of_the_examples(tmp_path: Path):
    one = open_source(write_tar(tmp_path / "a.tar", {"a.png": image(0), "a.txt": b"x"}))
    (tmp_path / "moved").mkdir()
    same = open_source(write_tar(tmp_path / "moved" / "b.tar", {"a.png": image(0), "a.txt": b"x"}))
    other = open_source(write_tar(tmp_path / "c.tar", {"b.png": image(0), "b.txt": b"x"}))
    assert one.fingerprint() == same.fingerprint() != other.fingerprint()


def test_a_fingerprint_is_of_the_texts_too(tmp_path: Path):
    """Also where another caption has the same length, in a tar and in a folder with either kind of metadata."""
    prints = {
        open_source(write_tar(tmp_path / f"{text}.tar", {"a.png": image(0), "a.txt": text})).fingerprint()
        for text in (b"x", b"y")
    }
    assert len(prints) == 2
    (tmp_path / "f").mkdir()
    (tmp_path / "f" / "a.png").write_bytes(image(0))
    for text in "xy":
        (tmp_path / "f" / "a.txt").write_text(text)
        prints.add(open_source(tmp_path / "f").fingerprint())
    for text in "xy":
        (tmp_path / "f" / "metadata.jsonl").write_text(json.dumps({"file_name": "a.png", "text": text}))
        prints.add(open_source(tmp_path / "f").fingerprint())
    assert len(prints) == 6


def test_what_cannot_be_read_is_not_taken_for_filtered_out(tmp_path: Path):
    tar = write_tar(tmp_path / "a.tar", {"a.png": image(0), "a.json": b'{"text": "x", "n": 1}'})
    source = pickle.loads(pickle.dumps(open_source(tar)))  # which has no file open
    tar.rename(tmp_path / "gone")
    with pytest.raises(LostExample, match="a.tar cannot be read"):
        filtered(source, [Filter("n", "==1")], tmp_path)
    with pytest.raises(LostExample, match="a.tar cannot be read"):
        image_sizes(source, tmp_path)
    assert not [*tmp_path.glob("*.rows"), *tmp_path.glob("*.sizes")]
