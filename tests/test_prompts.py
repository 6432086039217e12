"""What is to be drawn, from keys and files."""

import json
import re
from pathlib import Path

import pytest

from maxdiff.config import Sampling
from maxdiff.prompts import slug, wanted


def test_one_prompt():
    (image,) = wanted(Sampling(prompt="A red heart!", negative_prompt="blue"), seed=7)
    assert (image.prompt, image.negative_prompt, image.seed, image.file) == ("A red heart!", "blue", 7, "a-red-heart-7.png")


def test_each_image_of_several_has_a_seed_and_a_name_of_its_own():
    images = wanted(Sampling(prompts=("a cat", "a cat"), num_images_per_prompt=2), seed=3)
    assert [image.seed for image in images] == [3, 4, 5, 6]
    assert [image.file for image in images] == [
        "00000-a-cat-3.png",
        "00000-a-cat-4.png",
        "00001-a-cat-5.png",
        "00001-a-cat-6.png",
    ]
    images = wanted(Sampling(prompts=("a cat", "a dog"), seeds=(9, 2)), seed=3)
    assert [image.seed for image in images] == [9, 2]


def test_a_file_of_lines(tmp_path: Path):
    (tmp_path / "a.txt").write_text("\ufeffa cat\n\n  ein Hund, groß \n", encoding="utf-8")  # as Windows' editor begins
    images = wanted(Sampling(prompts_file=str(tmp_path / "a.txt")), seed=0)
    assert [(image.prompt, image.seed) for image in images] == [("a cat", 0), ("ein Hund, groß", 1)]


def test_a_file_of_objects(tmp_path: Path):
    lines = [{"prompt": "a cat"}, {"prompt": "a dog", "negative_prompt": "", "seed": 100, "image": "i.png", "mask": "m.png"}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    images = wanted(Sampling(prompts_file=str(tmp_path / "a.jsonl"), negative_prompt="blur", num_images_per_prompt=2), seed=5)
    assert [(image.seed, image.negative_prompt) for image in images] == [(5, "blur"), (6, "blur"), (100, ""), (101, "")]
    assert (images[0].image, images[3].image, images[3].mask) == ("", "i.png", "m.png")


def test_names():
    assert slug("A cat, in a HAT?!") == "a-cat-in-a-hat"
    assert slug("/../") == "image"
    assert len(slug("word " * 50)) <= 60
    assert len(slug("\N{CJK UNIFIED IDEOGRAPH-20000}" * 80).encode()) <= 180


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({}, "no prompt given; allowed: one of prompt, prompts and prompts_file"),
        ({"prompt": "a", "prompts": ("b",)}, "prompt and prompts given; allowed: one of"),
        (
            {"prompts": ("a", "b"), "seeds": (1,)},
            "seeds has 1 numbers for 2 prompts with num_images_per_prompt=1; allowed: 2 of them, or none",
        ),
        ({"prompt": "a", "seeds": (-1,)}, "seed=-1 is out of range (allowed: 0 to 4294967295)"),
        ({"prompts_file": "@/none.txt"}, "prompts_file='@/none.txt' cannot be read: [Errno 2]"),
        ({"prompts_file": "@/empty.txt"}, "prompts_file='@/empty.txt' has no prompt"),
        (
            {"prompts_file": "@/a.jsonl"},
            "a.jsonl, line 2: there is no 'sed' (allowed: prompt, negative_prompt, seed, image, mask)",
        ),
        ({"prompts_file": "@/b.jsonl"}, "b.jsonl, line 1: seed=True has the wrong type (allowed: int)"),
        ({"prompts_file": "@/c.jsonl"}, "c.jsonl, line 1 is no JSON: "),
        ({"prompts_file": "@/d.jsonl"}, "d.jsonl, line 1 is no object with a prompt"),
        ({"prompts_file": "@/e.jsonl"}, "e.jsonl, line 1: prompt='\\ud800' is no text: it has half of a character"),
        ({"prompts_file": "@/f.json"}, "f.json' is not supported; allowed: .jsonl, an object on each line, or .txt"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, sampling: dict, message: str):
    files = {"empty.txt": "\n \n", "a.jsonl": '{"prompt": "a"}\n{"prompt": "b", "sed": 1}', "b.jsonl": '{"prompt": "a", "seed": true}',
             "c.jsonl": "{", "d.jsonl": '"a"', "e.jsonl": '{"prompt": "\\ud800"}', "f.json": "[]"}  # fmt: skip
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    at = {key: value.replace("@", str(tmp_path)) if isinstance(value, str) else value for key, value in sampling.items()}
    with pytest.raises(ValueError, match=re.escape(message.replace("@", str(tmp_path)))):
        wanted(Sampling(**at), seed=0)
