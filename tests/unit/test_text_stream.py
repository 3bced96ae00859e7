"""Detokenization and stop strings, token by token, against decoding the whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from cachelink_core.engine.text_stream import INCOMPLETE, TextStream
from cachelink_core.testing.tiny_tokenizer import tiny_tokenizer

BYTE_LEVEL = tiny_tokenizer()
TEXTS = [
    "naïve café",
    "日本語のテキスト",
    "👩‍👩‍👧 family 🏳️‍🌈",
    "a\u0301 combining",
    "\ufeff bom",
    "¿señor? – “yes”",
]

BAD = BYTE_LEVEL.convert_tokens_to_ids("Ģ")
"""Byte 0x80, which begins no character."""


def _bytes_of(text: str) -> list[int]:
    """One id a byte: no merges, so that every character of several bytes is split."""
    return [BYTE_LEVEL.convert_tokens_to_ids(t) for c in text for t in BYTE_LEVEL.tokenize(c)]


def _decode(ids: Sequence[int]) -> str:
    return BYTE_LEVEL.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def _sentencepiece() -> tuple[dict[str, int], Callable[[Sequence[int]], str]]:
    """A vocabulary and decoder as Llama 2 and Mistral have: ``▁`` is a space, bytes fall back."""
    pieces = ["<unk>", "▁", "▁the", "▁sun", "s", "et", "▁▁", "é"]
    pieces += [f"<0x{byte:02X}>" for byte in range(256)]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return vocabulary, backend.decode


def _run(decode, ids: Sequence[int], stop: Sequence[str] = ()) -> tuple[list[str], bool]:
    stream = TextStream(decode, stop)
    pieces = []
    for token_id in ids:
        pieces.append(stream.push(token_id))
        if stream.stopped:
            break
    return [*pieces, stream.flush()], stream.stopped


@pytest.mark.parametrize("text", TEXTS)
def test_no_character_is_split(text):
    pieces, _ = _run(_decode, _bytes_of(text))
    assert "".join(pieces) == text
    assert not any(INCOMPLETE in piece for piece in pieces)


def test_a_character_comes_with_its_last_byte():
    pieces, _ = _run(_decode, _bytes_of("a😀b"))
    assert pieces == ["a", "", "", "", "😀", "b", ""]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, len(BYTE_LEVEL) - 1), max_size=60))
@example([BAD] * 12)
@example([BAD] * 9 + _bytes_of("€"))
def test_any_ids_join_to_the_decoded_whole(ids):
    pieces, _ = _run(_decode, ids)
    assert "".join(pieces) == _decode(ids)


def test_ids_that_are_no_text_do_not_hold_back_the_rest_for_ever():
    assert _decode([BAD]) == INCOMPLETE
    calls: list[int] = []

    def decode(ids: Sequence[int]) -> str:
        calls.append(len(ids))
        return _decode(ids)

    pieces, _ = _run(decode, [BAD] * 500)
    assert "".join(pieces) == INCOMPLETE * 500
    assert max(calls) <= 130  # each id decodes all undecided ones: their number must be bounded
    assert len("".join(pieces[:100])) >= 90


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(["▁", "▁the", "▁sun", "s", "et", "▁▁", "é", "日", "😀"])))
def test_spaces_of_a_sentencepiece_vocabulary_survive(words):
    vocabulary, decode = _sentencepiece()
    ids = []
    for word in words:
        if word in vocabulary:
            ids.append(vocabulary[word])
        else:
            ids += [vocabulary[f"<0x{byte:02X}>"] for byte in word.encode()]
    pieces, _ = _run(decode, ids)
    assert "".join(pieces) == decode(ids)
    assert not any(INCOMPLETE in piece for piece in pieces)


def test_special_tokens_give_no_text_and_no_lost_space():
    vocabulary, decode = _sentencepiece()
    ids = [vocabulary["▁the"], vocabulary["▁sun"]]
    special = len(vocabulary)

    def skipping(ids: Sequence[int]) -> str:
        return decode([i for i in ids if i != special])

    pieces, _ = _run(skipping, [special, ids[0], special, special, ids[1], special])
    assert "".join(pieces) == "the sun"


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("one two three", ["two"], "one "),
        ("one two three", ["three", "two"], "one "),
        ("ababac", ["abac"], "ab"),
        ("aaab", ["aab"], "a"),
        ("one\n\ntwo", ["\n\n"], "one"),
        ("stop", ["stop"], ""),
        ("almost sto", ["stop"], "almost sto"),
        ("no such", ["xyz"], "no such"),
        ("a 😀 b", ["😀"], "a "),
        ("overlap", ["lap", "verl"], "o"),
    ],
)
def test_text_ends_before_the_first_stop_string(text, stop, expected):
    pieces, stopped = _run(_decode, _bytes_of(text), stop)
    assert "".join(pieces) == expected
    assert stopped == (text != expected)


def test_what_may_become_a_stop_string_is_held_back_until_it_is_decided():
    pieces, _ = _run(_decode, _bytes_of("a stone stop b"), ["stop"])
    assert pieces[:8] == ["a", " ", "", "", "", "ston", "e", " "]
    assert "".join(pieces) == "a stone "


@settings(max_examples=300, deadline=None)
@given(
    st.text("ab", max_size=40),
    st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3),
)
def test_stop_strings_equal_a_search_in_the_whole_text(text, stop):
    """The earliest end wins, since the stream stops there; then the earliest begin."""
    ends = [text.find(s) + len(s) for s in stop if s in text]
    expected = text
    if ends:
        seen = text[: min(ends)]
        expected = seen[: min(seen.find(s) for s in stop if s in seen)]
    pieces, stopped = _run(_decode, _bytes_of(text), stop)
    assert "".join(pieces) == expected
    assert stopped == bool(ends)
