"""Training lines: both forms, what is refused, and how they are split and ordered."""

import json

import pytest

from cachelink_core.errors import InvalidRequest
from cachelink_core.fit.train_data import (
    Example,
    batch_order,
    data_digest,
    read_examples,
    split_held_out,
)
from cachelink_core.testing.tiny_engines import tiny_engine


@pytest.fixture(scope="module")
def tokens():
    return tiny_engine("qwen3").tokens


def written(folder, *rows):
    path = folder / "data.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


TEXTS = {"prefix": "the cat sat", "query": " on?", "continuation": " the mat"}
IDS = {"prefix_ids": [0, 7, 8], "query_ids": [9], "continuation_ids": [10, 11]}


def test_texts_and_ids_are_both_read(tokens, tmp_path):
    mixed = {"prefix_ids": [0, 7], "query": " on?", "continuation_ids": [10]}
    found = read_examples(written(tmp_path, TEXTS, "", IDS, mixed), tokens, chat=False)
    assert found[0] == Example(
        (0, *tokens.plain("the cat sat")), tokens.plain(" on?"), tokens.plain(" the mat")
    )
    assert found[1] == Example((0, 7, 8), (9,), (10, 11))
    assert found[2] == Example((0, 7), tokens.plain(" on?"), (10,))


def test_in_the_chat_template_the_query_is_framed_as_in_a_handoff(tokens, tmp_path):
    document = tokens.document("the cat sat", chat=True)
    (found,) = read_examples(written(tmp_path, TEXTS), tokens, chat=True)
    assert found.prefix_ids == document.ids
    assert found.query_ids == tokens.question(" on?", document.frame)
    assert len(found.query_ids) > len(tokens.plain(" on?"))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({**TEXTS, "continuation": ""}, r"data\.jsonl:2: continuation is empty"),
        ({**IDS, "continuation_ids": []}, r"data\.jsonl:2: continuation is empty"),
        ({**TEXTS, "query": ""}, r"data\.jsonl:2: query is empty"),
        ({"prefix": "a", "query": "b"}, r":2: needs one of 'continuation' and 'continuation_ids'"),
        ({**TEXTS, "query_ids": [3]}, r":2: needs one of 'query' and 'query_ids'"),
        ({**IDS, "query_ids": [1, -2]}, r":2: query is neither a text nor a list of token ids"),
        ({**IDS, "query_ids": [True]}, r":2: query is neither"),
        ({**TEXTS, "prefix": 5}, r":2: prefix is neither"),
        ("[1, 2]", r":2: a list, not an object"),
        ("{", r":2: not JSON"),
    ],
)
def test_a_wrong_line_is_named(tokens, tmp_path, row, message):
    with pytest.raises(InvalidRequest, match=message):
        read_examples(written(tmp_path, TEXTS, row), tokens)


def test_too_long_and_nothing_at_all_are_refused(tokens, tmp_path):
    with pytest.raises(InvalidRequest, match=r":1: 6 tokens in all; the model has 5 positions"):
        read_examples(written(tmp_path, IDS), tokens, max_tokens=5)
    assert len(read_examples(written(tmp_path, IDS), tokens, max_tokens=6)) == 1
    with pytest.raises(InvalidRequest, match="has no examples"):
        read_examples(written(tmp_path, ""), tokens)
    with pytest.raises(InvalidRequest, match="cannot be read"):
        read_examples(tmp_path / "none.jsonl", tokens)


def test_examples_of_one_document_stay_on_one_side():
    made = [Example((0, i // 3), (1, i), (2,)) for i in range(30)]
    train, held_out = split_held_out(made, 7, seed=1)
    assert 7 <= len(held_out) <= 9
    assert len(train) + len(held_out) == 30
    assert not {e.prefix_ids for e in train} & {e.prefix_ids for e in held_out}
    assert split_held_out(made, 7, seed=1) == (train, held_out)
    assert split_held_out(made, 7, seed=2)[1] != held_out
    with pytest.raises(InvalidRequest, match="leave none to train on"):
        split_held_out(made, 30, seed=1)


def test_an_epoch_sees_every_example_once():
    seen = [place for step in range(10) for place in batch_order(7, 3, step, seed=4)]
    assert sorted(seen[:7]) == sorted(seen[7:14]) == list(range(7))
    assert seen[:7] != seen[7:14]
    assert batch_order(7, 3, 2, seed=4) == seen[6:9]
    assert [batch_order(7, 3, s, seed=5) for s in range(3)] != [seen[:3], seen[3:6], seen[6:9]]


def test_the_digest_knows_where_a_part_ends():
    first, second = Example((1, 2), (3,), (4,)), Example((1,), (2, 3), (4,))
    assert data_digest([first]) != data_digest([second])
    assert data_digest([first, second]) != data_digest([second, first])
