"""Texts to sequences: enough of them, split by document, the same for a seed."""

import builtins
import json

import pytest

from cachelink_core.errors import ConfigError, InvalidRequest
from cachelink_core.fit.calibration import calibrate, read_documents


def encode(text):
    return [ord(letter) for letter in text]


def made(count=30, letters=40):
    """Documents that share no token: document i is written with one letter of its own."""
    return [chr(1_000 + index) * letters for index in range(count)]


def test_no_document_is_on_both_sides():
    found = calibrate(made(), encode, bos_id=1, source="s", sequences=10, length=33, stride=2)
    sides = [
        {token for ids in side for token in ids} - {1} for side in (found.train, found.held_out)
    ]
    assert not sides[0] & sides[1]
    assert len(found.train) == 10
    assert len(found.held_out) == 1
    assert all(len(ids) == 33 and ids[0] == 1 for ids in found.train + found.held_out)
    assert found.record.documents + found.record.held_out_documents <= 30


def test_without_a_bos_every_token_is_text():
    found = calibrate(made(), encode, bos_id=None, source="s", sequences=4, length=16)
    assert all(len(ids) == 16 for ids in found.train)
    assert found.train[0] == (1_000,) * 16


def test_a_share_of_0_holds_nothing_out():
    found = calibrate(made(2), encode, bos_id=1, source="s", sequences=1, length=9, held_out=0)
    assert found.held_out == ()
    assert found.record.held_out_sequences == 0


def test_too_little_text_says_what_there_is_and_what_is_needed():
    with pytest.raises(InvalidRequest, match=r"320 tokens to fit on in 8 .* 50 .* 100 need 4950"):
        calibrate(made(9), encode, bos_id=1, source="s", sequences=50, length=100)
    with pytest.raises(InvalidRequest, match=r"0 tokens held out in 0 documents; 1 sequences"):
        calibrate(made(1, 999), encode, bos_id=1, source="s", sequences=2, length=100)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sequences": 0}, "sequences is 0"),
        ({"length": 1}, "length 1"),
        ({"stride": 0}, "stride is 0"),
        ({"stride": 64}, "stride is 64"),
        ({"held_out": 1.5}, "held_out is 1.5"),
    ],
)
def test_numbers_out_of_range_are_named(changes, words):
    numbers = {"sequences": 2, "length": 64, "stride": 4} | changes
    with pytest.raises(InvalidRequest, match=words):
        calibrate(made(), encode, bos_id=None, source="s", **numbers)


def test_the_digest_covers_the_tokens_and_the_split():
    def digest(**kwargs):
        return calibrate(made(), encode, bos_id=1, source="s", length=33, **kwargs).record.digest

    assert digest(sequences=5) == digest(sequences=5)
    assert digest(sequences=5) != digest(sequences=6)
    assert digest(sequences=5) != digest(sequences=5, held_out=0.5)


def test_files_folders_and_lines_are_read_in_an_order_of_the_seed(tmp_path):
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.md").write_text("two")
    lines = [json.dumps({"text": word, "other": 1}) for word in ("three", "four")]
    (tmp_path / "c.jsonl").write_text("\n".join(lines) + "\n\n")
    (tmp_path / "ignored.png").write_bytes(b"\xff")
    first = list(read_documents(str(tmp_path)))
    assert sorted(first) == ["four", "one", "three", "two"]
    assert list(read_documents(str(tmp_path))) == first
    orders = {tuple(read_documents(str(tmp_path), seed=seed)) for seed in range(8)}
    assert len(orders) > 1
    assert list(read_documents(str(tmp_path / "a.txt"))) == ["one"]


def test_a_bad_line_and_a_missing_file_are_named(tmp_path):
    path = tmp_path / "c.jsonl"
    path.write_text('{"text": "fine"}\n{"words": 1}\n')
    with pytest.raises(InvalidRequest, match=r"c\.jsonl:2 .* 'text'"):
        read_documents(str(path))
    with pytest.raises(ConfigError, match=r"missing\.txt.*no such file"):
        read_documents(str(tmp_path / "missing.txt"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"has no \.jsonl"):
        read_documents(str(tmp_path / "empty"))


def test_a_hub_data_set_without_the_package_says_what_to_install(monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name == "datasets":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match="pip install datasets"):
        list(read_documents("HuggingFaceFW/fineweb-edu:sample-10BT"))
