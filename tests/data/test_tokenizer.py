"""The tokenizer writes any text, and the same texts give the same file."""

from __future__ import annotations

import pytest
from texts import TEXTS

from forgekit.data.tokenizer import (
    END_OF_TEXT,
    load_tokenizer,
    split_long_words,
    train_tokenizer,
)


def test_any_text_comes_back_and_the_same_texts_give_the_same_file():
    tokenizer, again = (train_tokenizer(iter(TEXTS[:2]), vocab_size=300) for _ in range(2))
    assert tokenizer.to_str() == again.to_str()
    assert tokenizer.get_vocab_size() == 300
    assert len(tokenizer.encode(TEXTS[0]).ids) < 0.9 * len(TEXTS[0].encode())
    for text in (*TEXTS, "\x00\r\n\t  never seen: ✓ ẞ 𝄞", " leading and trailing "):
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_a_literal_end_of_text_is_plain_characters_also_after_loading(tmp_path):
    tokenizer = train_tokenizer(TEXTS, vocab_size=300)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    for each in (tokenizer, load_tokenizer(tmp_path), load_tokenizer(tmp_path / "tokenizer.json")):
        assert each.token_to_id(END_OF_TEXT) == 0
        ids = each.encode(f"a{END_OF_TEXT}b").ids
        assert 0 not in ids
        assert each.decode(ids) == f"a{END_OF_TEXT}b"


def test_what_cannot_be_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"vocab_size 256 must be at least 257"):
        train_tokenizer(TEXTS, vocab_size=256)
    with pytest.raises(TypeError, match=r"texts is a str, whose items are characters"):
        train_tokenizer("to be", 300)
    with pytest.raises(FileNotFoundError, match=r"tokenizer.json does not exist; `forgekit prep"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer.json is not a tokenizer of the"):
        load_tokenizer(tmp_path)


@pytest.mark.timeout(60)
def test_training_on_text_without_white_space_is_not_quadratic():
    """Of 300,000 characters in one word it took minutes."""
    tokenizer = train_tokenizer(["a" * 300_000, "to be"], vocab_size=280)
    assert tokenizer.decode(tokenizer.encode("a" * 9).ids) == "a" * 9


@pytest.mark.parametrize("text", ["x" * 1023 + " " + "y" * 1023, "語、" * 3000, "\n \t" * 300])
def test_only_words_of_a_thousand_characters_are_learnt_from_in_pieces(text):
    assert list(split_long_words([text, "a"])) == [text, "a"]
    for word in ("é" * 9000, "1" * 5000, " " * 5000, "-" * 4097 + "a" * 1500):
        pieces = list(split_long_words([f"to be {word} or not"]))
        assert "".join(pieces) == f"to be {word} or not"
        assert len(pieces) > 2
        assert max(map(len, pieces)) < 3 * 1024
