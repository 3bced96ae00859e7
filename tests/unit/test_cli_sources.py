"""What a command reads: texts, token ids and conversations, from files, arguments and pipes."""

import io
import json
import sys

import pytest

from cachelink_core.cli.answer import read_context, read_query
from cachelink_core.cli.handoff import read_prefix
from cachelink_core.cli.sources import only_one, read_messages, read_text, read_token_ids
from cachelink_core.errors import InvalidRequest
from cachelink_core.rpc.client import (
    Conversation,
    Document,
    HeldCache,
    HeldHandoff,
    Message,
    Question,
    TokenIds,
    VerbatimText,
)


@pytest.fixture
def written(tmp_path):
    def write(content: bytes | str):
        path = tmp_path / "file"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(path)

    return write


def test_a_text_is_read_as_it_is(written):
    assert read_text(written("  zwölf\r\n\n")) == "  zwölf\r\n\n"


def test_standard_input_is_read_as_utf_8(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("é".encode()), "ascii"))
    assert read_text("-") == "é"


def test_a_text_that_is_not_utf_8_is_refused(written):
    with pytest.raises(InvalidRequest, match="not UTF-8"):
        read_text(written(b"\xff\xfe"))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(InvalidRequest, match=r"nowhere.*No such file"):
        read_text(str(tmp_path / "nowhere"))


@pytest.mark.parametrize("text", ["1,2,30", "[1, 2, 30]", " 1 2\n30 ", "1,\n2,\n30\n"])
def test_token_ids_come_as_an_argument_or_in_a_file(text, written):
    assert read_token_ids(text) == read_token_ids(written(text)) == TokenIds((1, 2, 30))


def test_no_token_ids_are_a_list_too():
    assert read_token_ids("[]") == TokenIds(())


@pytest.mark.parametrize(
    ("text", "named"), [("1,x", "'x'"), ("1 -2", "'-2'"), ("1 2.5", "'2.5'"), ("1 ٣", "'٣'")]
)
def test_what_is_no_token_id_is_named(text, named, written):
    with pytest.raises(InvalidRequest, match=rf"token_ids\[1\] is {named}"):
        read_token_ids(written(text))


def test_a_token_id_beyond_u32_is_refused():
    with pytest.raises(InvalidRequest, match="4294967296"):
        read_token_ids("4294967296")


def test_messages_are_a_json_list(written):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    expected = Conversation((Message("user", "hi"), Message("assistant", "yes")))
    assert read_messages(written(json.dumps(messages))) == expected


@pytest.mark.parametrize(
    "text",
    ["{}", "[1]", "[", '[{"role": "user"}]', '[{"role": "user", "content": 3}]',
     '[{"role": "user", "content": "x", "name": "y"}]'],
)  # fmt: skip
def test_messages_of_another_form_are_refused(text, written):
    with pytest.raises(InvalidRequest, match="messages in"):
        read_messages(written(text))


def test_an_empty_conversation_is_refused(written):
    with pytest.raises(InvalidRequest, match="none given"):
        read_messages(written("[]"))


def test_exactly_one_argument_is_wanted():
    assert only_one("x", FILE=None, token_ids="1") == "token_ids"
    with pytest.raises(InvalidRequest, match=r"nothing given; .* FILE, --token-ids"):
        only_one("x", FILE=None, token_ids=None)
    with pytest.raises(InvalidRequest, match="FILE, --token-ids given"):
        only_one("x", FILE="f", token_ids="1")


def test_each_prefix_is_understood(written):
    path = written("a text")
    assert read_prefix(path, None, None, None, chat=None) == Document("a text", None)
    assert read_prefix(path, None, None, None, chat=False) == Document("a text", chat=False)
    assert read_prefix(None, "1,2", None, None, chat=None) == TokenIds((1, 2))
    assert read_prefix(None, None, None, "id", chat=None) == HeldCache("id")
    path = written('[{"role": "user", "content": "hi"}]')
    hi = Conversation((Message("user", "hi"),))
    assert read_prefix(None, None, path, None, chat=None) == hi


def test_each_context_is_understood(written):
    path = written("a text")
    assert read_context("c", None, None, None, None) == HeldCache("c")
    assert read_context(None, "h", None, None, None) == HeldHandoff("h")
    assert read_context(None, None, path, None, None) == Document("a text")
    assert read_context(None, None, None, "7", None) == TokenIds((7,))
    path = written('[{"role": "user", "content": "hi"}]')
    hi = Conversation((Message("user", "hi"),))
    assert read_context(None, None, None, None, path) == hi


def test_each_query_is_understood(written):
    assert read_query("why?", None, None, None) == Question("why?")
    assert read_query("", None, None, None) == Question("")
    assert read_query(None, "and", None, None) == VerbatimText("and")
    assert read_query(None, None, "7", None) == TokenIds((7,))
    path = written('[{"role": "user", "content": "hi"}]')
    hi = Conversation((Message("user", "hi"),))
    assert read_query(None, None, None, path) == hi
