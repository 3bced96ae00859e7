"""Rows of the published data sets' schemas become training lines."""

import json

import pytest
from typer.testing import CliRunner

from cachelink_core.errors import ConfigError, InvalidRequest
from cachelink_core.fit.converters import CONVERTERS, NO_ANSWER, convert
from cachelink_core.fit.train_commands import convert_app

ROWS = {
    "commonsense_qa": {
        "id": "1",
        "question": "Where does a fish live?",
        "question_concept": "fish",
        "choices": {"label": ["A", "B"], "text": ["tree", "sea"]},
        "answerKey": "B",
    },
    "cosmos_qa": {
        "id": "1",
        "context": "It rained all day.",
        "question": "Why did she stay in?",
        **{f"answer{i}": text for i, text in enumerate(["Sun.", "Rain.", "Snow.", "None."])},
        "label": 1,
    },
    "squad_v2": {
        "id": "1",
        "title": "Oslo",
        "context": "Oslo is the capital of Norway.",
        "question": "What is Oslo?",
        "answers": {"text": ["the capital of Norway", "capital"], "answer_start": [8, 12]},
    },
    "drop": {
        "section_id": "s",
        "query_id": "q",
        "passage": "They scored 3 and 4 goals.",
        "question": "How many goals?",
        "answers_spans": {"spans": ["7", "7"], "types": ["number", "number"]},
    },
    "multidoc2dial": {
        "document": "Forms are due in May.",
        "turns": [
            {"role": "user", "utterance": "When are forms due?"},
            {"role": "agent", "utterance": "In May."},
            {"role": "user", "utterance": "Thanks. Any fee?"},
            {"role": "agent", "utterance": "None. "},
        ],
    },
    "contract_nli": {
        "premise": "Party A keeps it secret.",
        "hypothesis": "Party A may publish it.",
        "label": 0,
    },
    "long_align": {
        "id": "1",
        "messages": [
            {"role": "user", "content": "First part.\nSecond part.\n\nWhat comes second?\n"},
            {"role": "assistant", "content": "The second part."},
        ],
        "length": 12,
    },
}


def written(folder, *rows):
    path = folder / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    return path


def lines(folder, name, *rows, **kwargs):
    out = folder / "out.jsonl"
    count = convert(name, str(written(folder, *rows)), out, **kwargs)
    found = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert len(found) == count
    return found


@pytest.mark.parametrize("name", CONVERTERS)
def test_every_line_has_three_parts(tmp_path, name):
    for line in lines(tmp_path, name, ROWS[name]):
        assert list(line) == ["prefix", "query", "continuation"]
        assert all(part.strip() for part in line.values())


def test_commonsense_qa(tmp_path):
    (line,) = lines(tmp_path, "commonsense_qa", ROWS["commonsense_qa"])
    assert line == {
        "prefix": "A. tree\nB. sea",
        "query": "Where does a fish live?\nAnswer:",
        "continuation": " B. sea",
    }


def test_cosmos_qa(tmp_path):
    (line,) = lines(tmp_path, "cosmos_qa", ROWS["cosmos_qa"], {**ROWS["cosmos_qa"], "label": -1})
    assert line["prefix"] == "It rained all day."
    assert line["query"].splitlines()[2] == "B. Rain."
    assert line["continuation"] == " B. Rain."


def test_squad_with_and_without_an_answer(tmp_path):
    row = ROWS["squad_v2"]
    open_row = {**row, "answers": {"text": [], "answer_start": []}}
    found = lines(tmp_path, "squad_v2", row, open_row)
    assert [line["continuation"] for line in found] == [" the capital of Norway", f" {NO_ANSWER}"]


def test_drop_names_each_span_once(tmp_path):
    row = ROWS["drop"]
    two = {**row, "answers_spans": {"spans": ["Ada", "Leo"], "types": ["span", "span"]}}
    found = lines(tmp_path, "drop", row, two, {**row, "answers_spans": {"spans": [], "types": []}})
    assert [line["continuation"] for line in found] == [" 7", " Ada, Leo"]


def test_multidoc2dial_gives_a_line_for_each_reply(tmp_path):
    first, second = lines(tmp_path, "multidoc2dial", ROWS["multidoc2dial"])
    assert first["query"] == "User: When are forms due?\nAgent:"
    assert first["continuation"] == " In May."
    assert second["query"].splitlines()[1] == "Agent: In May."
    assert second["continuation"] == " None."
    assert first["prefix"] == second["prefix"]


def test_contract_nli_labels(tmp_path):
    row = ROWS["contract_nli"]
    found = lines(
        tmp_path, "contract_nli", row, {**row, "label": 2}, {**row, "label": "Entailment"}
    )
    assert [line["continuation"] for line in found] == [
        " contradicted", " not mentioned", " entailment",
    ]  # fmt: skip


def test_long_align_asks_the_last_paragraph(tmp_path):
    (line,) = lines(tmp_path, "long_align", ROWS["long_align"])
    assert line["prefix"].endswith("Second part.\n")
    assert line["query"] == "What comes second?\n"
    assert line["continuation"] == "The second part."


def test_limits(tmp_path):
    row = ROWS["squad_v2"]
    assert len(lines(tmp_path, "squad_v2", row, row, row, limit=2)) == 2
    long = {**row, "context": "x" * 100}
    assert len(lines(tmp_path, "squad_v2", long, row, max_chars=50)) == 1


def test_a_row_of_another_data_set_is_named(tmp_path):
    path = written(tmp_path, ROWS["drop"], ROWS["squad_v2"])
    with pytest.raises(InvalidRequest, match=r"row 2 is none of drop: KeyError"):
        convert("drop", str(path), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_bad_sources(tmp_path):
    path = written(tmp_path, ROWS["drop"])
    with pytest.raises(ConfigError, match="converter is 'trivia'; known: commonsense_qa"):
        convert("trivia", str(path), tmp_path / "out")
    path.write_text('{"passage": 1}\n{oops')
    with pytest.raises(InvalidRequest, match="row 1 is none of drop"):
        convert("drop", str(path), tmp_path / "out")
    path.write_text("{oops")
    with pytest.raises(InvalidRequest, match=r":1: not JSON"):
        convert("drop", str(path), tmp_path / "out")
    empty = {**ROWS["drop"], "answers_spans": {"spans": [], "types": []}}
    with pytest.raises(InvalidRequest, match="no row gave a line"):
        convert("drop", str(written(tmp_path, empty)), tmp_path / "out")


def test_the_command(tmp_path):
    source, out = written(tmp_path, ROWS["drop"], ROWS["drop"]), tmp_path / "out.jsonl"
    arguments = ["--as", "drop", "--source", str(source), "--out", str(out), "--limit", "1"]
    result = CliRunner().invoke(convert_app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert len(out.read_text().splitlines()) == 1
