from pathlib import Path

import numpy as np
import pytest

from maxdiff.weights.source import open_source
from maxdiff.weights.tokenizer import END, CLIPTokenizer, published_tokenizer, read_tokenizer

TEXTS = [
    "a photo of a cat",
    "",
    "A  “curly” quote’s ﬁ ligature",
    "🎉 emoji <|endoftext|> inside !",
    "word " * 100,
    "don't I'll 12345 naïve façade ÅNGSTRÖM",
    "hello !!! <|startoftext|> x\n\t tabs",
    "!",
    "中文字符 и русский",
    "a</w> b",
    "e\u0301 combining",
]


@pytest.mark.parametrize("pad", [END, "!"])
def test_ids_equal_transformers_and_files_go_both_ways(tmp_path: Path, pad: str):
    import transformers

    ours = published_tokenizer(pad)
    ours.save(tmp_path / "ours")
    theirs = transformers.CLIPTokenizer.from_pretrained(tmp_path / "ours")
    assert (theirs.pad_token, theirs.model_max_length) == (pad, 77)
    expected = theirs(TEXTS, padding="max_length", truncation=True, max_length=77, return_tensors="np").input_ids
    np.testing.assert_array_equal(ours(TEXTS), expected)
    assert ours(TEXTS).dtype == np.int32
    # transformers 5 writes tokenizer.json alone; 4 wrote the files that we write.
    theirs.save_pretrained(tmp_path / "theirs")
    assert not (tmp_path / "theirs" / "vocab.json").exists()
    assert read_tokenizer(open_source(tmp_path / "theirs"), "") == ours
    assert read_tokenizer(open_source(tmp_path), "ours") == ours


def test_both_of_sdxls_pad_differently():
    first, second = published_tokenizer(END)(["cat"]), published_tokenizer("!")(["cat"])
    assert list(first[0, :4]) == [49406, 2368, 49407, 49407]
    assert list(second[0, :4]) == [49406, 2368, 49407, 0]


def test_a_long_text_keeps_its_end_token_and_tells_its_length():
    tokenizer = published_tokenizer()
    assert tokenizer(["word " * 100])[0, -1] == 49407
    assert tokenizer.length("word " * 100) == 102
    assert tokenizer.length("cat") == 3


def test_one_text_is_one_row():
    np.testing.assert_array_equal(published_tokenizer()("a red heart"), published_tokenizer()(["a red heart"]))


def test_unusable_tokenizers_are_named(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="has neither t/vocab.json nor t/tokenizer.json"):
        read_tokenizer(open_source(tmp_path), "t")
    published_tokenizer().save(tmp_path / "t")
    config = tmp_path / "t" / "tokenizer_config.json"
    config.write_text(config.read_text().replace("CLIPTokenizer", "T5Tokenizer"))
    with pytest.raises(ValueError, match="tokenizer_class='T5Tokenizer' is not supported"):
        read_tokenizer(open_source(tmp_path), "t")
    published_tokenizer().save(tmp_path / "t")
    (tmp_path / "t" / "added_tokens.json").write_text('{"<my-cat>": 49408}')
    with pytest.raises(ValueError, match="added tokens .* are not supported"):
        read_tokenizer(open_source(tmp_path), "t")
    (tmp_path / "u").mkdir()
    (tmp_path / "u" / "tokenizer.json").write_text('{"model": {"type": "WordPiece", "vocab": {}}}')
    with pytest.raises(ValueError, match="u/tokenizer.json is not that of a CLIP tokenizer"):
        read_tokenizer(open_source(tmp_path), "u")
    with pytest.raises(ValueError, match="vocabulary has no '<|startoftext|>'"):
        CLIPTokenizer({"a": 0}, ())
