"""The shards that the repository holds, and the scripts that made them and their tokenizer."""

import io
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
from PIL import Image
from test_sources import write_tar

from maxdiff.data.examples import Columns
from maxdiff.data.sources import open_source
from maxdiff.data.transforms import make_picture
from maxdiff.weights.source import open_source as open_folder
from maxdiff.weights.tokenizer import END, START, published_tokenizer, read_tokenizer

ROOT = Path(__file__).parents[2]
CAPTIONS = Columns(("text", "phrase", "tags"))
TONES = {f"1f3f{digit}" for digit in "bcdef"}


def families(source) -> set[str]:
    names = [source[i].key.rpartition(":")[2] for i in range(len(source))]
    return {"-".join(part for part in name.split("-") if part not in TONES) for name in names}


def test_the_shards_are_whole_and_hold_out_families(tmp_path: Path):
    train = open_source(str(ROOT / "data/emoji/train-{000000..000002}.tar"), cache_dir=tmp_path)
    heldout = open_source(str(ROOT / "data/emoji/heldout-*.tar"), cache_dir=tmp_path)
    assert (len(train), len(heldout)) == (3209, 165)
    assert not families(train) & families(heldout)
    for source in (train, heldout):
        for i in range(0, len(source), 7):
            example = source[i]
            picture = make_picture(example.image, example.key, [0] * 4, 128)
            assert picture.original_size == (128, 128)
            assert (picture.image[0, 0] > 200).any()
            assert example.texts[0]


def test_captions_say_what_is_seen(tmp_path: Path):
    source = open_source(str(ROOT / "data/emoji/train-*.tar"), CAPTIONS, cache_dir=tmp_path)
    said = {}
    for i in range(len(source)):
        texts = source[i].texts
        said[texts[0]] = texts[1:]
    assert said["grapes"] == ("purple and green grapes", "grapes, dionysus, fruit, grape")
    assert said["cat face"][0] == "a yellow cat face"
    assert said["flag: Italy"][0] == "the white, green and red flag of Italy"
    assert said["green apple"][0] == "a green apple"
    assert said["man: dark skin tone, beard"][0] == "a man with dark skin and beard"
    assert said["robot"][0] == "a robot"  # of no colour in particular


def test_the_small_tokenizer_says_the_same_of_the_captions(tmp_path: Path):
    small, whole = read_tokenizer(open_folder(ROOT / "data/emoji_model/tokenizer"), ""), published_tokenizer()
    source = open_source(str(ROOT / "data/emoji/train-*.tar"), CAPTIONS, cache_dir=tmp_path)
    texts = sorted({text for i in range(0, len(source), 3) for text in source[i].texts})
    names = [{number: name for name, number in tokenizer.vocab.items()} for tokenizer in (small, whole)]
    tokens = lambda tokenizer, names: [[names[number] for number in row] for row in tokenizer(texts).tolist()]
    assert tokens(small, names[0]) == tokens(whole, names[1])
    assert len(small.vocab) < 7000
    # A word that no caption has falls into pieces that some have.
    row = small("a zyzzyva")[0].tolist()
    assert row[:2] == [small.vocab[START], small.vocab["a</w>"]]
    assert row.index(small.vocab[END]) > 3
    script = ROOT / "data/make_emoji_tokenizer.py"
    subprocess.run(
        [sys.executable, script, ROOT / "data/emoji/train-*.tar", tmp_path / "again"], check=True, capture_output=True
    )
    again = read_tokenizer(open_folder(tmp_path / "again"), "")
    assert again == small
    failed = subprocess.run([sys.executable, script, tmp_path / "*.tar", tmp_path / "c"], capture_output=True, text=True)
    assert failed.returncode == 2
    assert "holds no tars of .webp, .txt and .json" in failed.stderr


FIND = """import json, make_emoji_variants as v
found = list(v.examples({pattern!r}))
# All that is near what is always held out, and some of the rest.
some = [one for i, one in enumerate(found)
        if i % 25 == 0 or any(word in one[1]["txt"].decode() for word in ("heart", "cat", "elephant", "frog", "automobile"))]
worn, tags = v.worn_images(found), v.own_tags(found)
made = [files for one in some for _, _, files in v.variants(worn, tags, one)]
captions = [[files["txt"].decode(), *(json.loads(files["json"]).get(name, "") for name in ("phrase", "called"))] for files in made]
print(json.dumps([v.held_out_pairs(found), v.held_out_dresses(found), tags, captions]))
"""
ONE_COLOUR = "(?:red|orange|yellow|green|blue|purple|pink|brown|gray|black|white)"
SAID = re.compile(rf"(?:an? )?((?:{ONE_COLOUR}(?:, | and | ))*)(.*?)(?: (?:with|and) a (bow|crown|top hat|flower))?")


def test_no_caption_has_a_combination_that_is_held_out():
    code = FIND.format(pattern=str(ROOT / "data/emoji/train-*.tar"))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT / "data")
    pairs, dresses, tags, captions = json.loads(done.stdout)
    said = set()
    for caption in {text for texts in captions for text in texts}:
        found = SAID.fullmatch(caption)
        assert found is not None
        seen, thing, worn = found.groups()
        said |= {(thing, other) for other in [*re.findall(ONE_COLOUR, seen), worn]}
    assert {("cat face", "blue"), ("car", "blue"), ("cat face", "crown"), ("growing heart", "top hat")} <= said
    assert not said & {tuple(pair) for pair in [*pairs, *dresses]}
    assert not {thing for thing, worn in said if worn == "bow" and "heart" in thing}
    assert {("cat face", "purple"), ("elephant", "pink")} <= {tuple(pair) for pair in pairs}
    assert {("heart", "bow"), ("frog", "crown")} <= {tuple(pair) for pair in dresses}
    assert ["koala", "gray"] not in pairs
    assert 500 < len(pairs) < 987
    assert 200 < len(dresses) < 500
    assert not {tuple(pair) for pair in dresses} & {("ribbon", "bow"), ("crown", "crown"), ("top hat", "top hat")}
    assert "car" in tags["automobile"]
    assert "animal" not in tags["dog"]  # which says little
    assert not {"cat", "dog"} & {tag for some in tags.values() for tag in some}  # which others are


def test_variants_are_of_other_colours_and_wear_things_and_leave_some_out(tmp_path: Path):
    pixels = np.full((128, 128, 3), 255, np.uint8)
    pixels[32:96, 40:110] = (240, 200, 40)
    pixels[48:60, 50:60] = (20, 20, 20)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "WEBP", lossless=True)
    labels = {
        "cat face": "animals",
        "left cat": "animals",
        "yellow moon": "travel",
        "yellow hand": "people",
        "flag: Nowhere": "flags",
        "pink elephant": "animals",
        "swan": "animals",
        "crown": "objects",
        "top hat": "objects",
        "ribbon": "objects",
        "hibiscus": "animals",
    }
    tags = lambda label: f"{label}, luna" if "moon" in label else label
    about = lambda label, group: json.dumps({"phrase": f"a {label}", "tags": tags(label), "group": group}).encode()
    parts = lambda label, group: {"webp": file.getvalue(), "txt": label.encode(), "json": about(label, group)}
    write_tar(
        tmp_path / "a.tar",
        {f"{i}.{kind}": data for i, item in enumerate(labels.items()) for kind, data in parts(*item).items()},
    )
    script = ROOT / "data/make_emoji_variants.py"
    subprocess.run([sys.executable, script, tmp_path / "a.tar", tmp_path / "made"], check=True, capture_output=True)
    columns = Columns(("text", "phrase", "tags", "called"))
    mirrored, coloured, dressed = (
        open_source(tmp_path / "made" / f"{name}-000000.tar", columns) for name in ("mirrored", "recoloured", "dressed")
    )
    texts = lambda source: {source[i].texts for i in range(len(source))}
    worn = {"crown", "top hat", "ribbon", "hibiscus"}
    assert {text[0] for text in texts(mirrored)} == {"cat face", "yellow moon", "yellow hand", "pink elephant", "swan", *worn}
    assert next(text[-1] for text in texts(mirrored) if text[0] == "yellow moon") == "a luna"
    image = make_picture(mirrored[0].image, "", [0] * 4, 128).image.astype(int)
    assert image[54, 128 - 55].max() < 60  # the dark patch, on the other side
    assert image[54, 55].max() > 200
    said = {text[0]: text[1:] for text in texts(coloured)}
    assert {name.split(" ", 1)[1] for name in said} == {"cat face", "left cat", "moon", "elephant", "swan", *worn}
    assert said["blue moon"] == ("a blue moon", "a blue luna")
    clothed = {text[0]: text[1:] for text in texts(dressed)}
    assert any(name.endswith("moon with a bow") for name in clothed)
    assert not any(
        name.endswith(("swan with a crown", "top hat with a top hat", "cat face with a top hat")) for name in clothed
    )
    assert sum(name.endswith("hibiscus with a bow") for name in clothed) == 1
    assert not any(name.startswith("yellow") for name in said)
    prompts = [json.loads(line)["prompt"] for line in (tmp_path / "made" / "held_out.jsonl").read_text().splitlines()]
    assert "a purple cat face" in prompts
    assert "a swan with a crown" in prompts
    assert not set(prompts) & {text for some in (*said.values(), *clothed.values()) for text in some}
    assert "a pink elephant" not in prompts  # as one of the originals is
    blue = next(coloured[i] for i in range(len(coloured)) if coloured[i].texts[0] == "blue moon")
    image = make_picture(blue.image, "", [0] * 4, 128).image.astype(int)
    assert image[80, 80, 2] > image[80, 80, 0] + 100
    assert image[54, 55].max() < 60
    assert image[5, 5].min() > 245
    failed = subprocess.run([sys.executable, script, tmp_path / "none*.tar", tmp_path / "c"], capture_output=True, text=True)
    assert failed.returncode == 2
    assert "holds no tars of .webp, .txt and .json" in failed.stderr


def test_the_script_makes_the_same_bytes_twice(tmp_path: Path):
    file = io.BytesIO()
    pixels = np.zeros((256, 256, 4), np.uint8)
    pixels[64:192, 64:192] = (255, 0, 0, 255)
    Image.fromarray(pixels).save(file, "WEBP", lossless=True)
    (tmp_path / "in").mkdir()
    keys = [f"1f{i:03x}{tone}" for i in range(60) for tone in ("", "-1f3fb", "-1f3ff")]
    about = lambda key: json.dumps({"label": key, "tags": ["square", key], "group": 8, "skin_tone": "-" in key}).encode()
    parts = lambda key: {"webp": file.getvalue(), "txt": key.encode(), "json": about(key)}
    write_tar(tmp_path / "in" / "a.tar", {f"{key}.{kind}": data for key in keys for kind, data in parts(key).items()})
    made = []
    for folder in ("a", "b"):
        subprocess.run(
            [sys.executable, ROOT / "data/make_emoji.py", tmp_path / "in", tmp_path / folder], check=True, capture_output=True
        )
        made.append({path.name: path.read_bytes() for path in sorted((tmp_path / folder).iterdir())})
    assert made[0] == made[1]
    assert list(made[0]) == ["heldout-000000.tar", "train-000000.tar"]
    heldout, train = (open_source(tmp_path / "a" / name, CAPTIONS) for name in made[0])
    assert train[0].texts == (keys[0], f"a red {keys[0]}", f"{keys[0]}, square")
    assert len(heldout) + len(train) == len(keys)
    assert len(heldout) % 3 == 0
    image = make_picture(train[0].image, "", [0] * 4, 128).image.astype(int)
    assert np.abs(image[0, 0] - 255).max() < 6
    assert np.abs(image[64, 64] - (255, 0, 0)).max() < 6
    failed = subprocess.run(
        [sys.executable, ROOT / "data/make_emoji.py", tmp_path / "none", tmp_path / "c"], capture_output=True, text=True
    )
    assert failed.returncode == 2
    assert "holds no tars of .webp, .txt and .json" in failed.stderr
