"""``cachelink train`` and ``cachelink gate`` on the recall pair, from files to files."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cachelink_bench.recall_pair.pair import MODELS, example
from cachelink_bench.recall_pair.task import held_out_documents
from cachelink_core.errors import InvalidRequest
from cachelink_core.fit.train_commands import gate_app, train_app
from cachelink_core.transport.artifact import read_card, verify_mapper

MAPPERS = MODELS / "mappers"
PAIR = ["--sender", str(MODELS / "sender"), "--receiver", str(MODELS / "receiver")]


def written(path: Path, count: int) -> str:
    rows = [example(drawn, 4) for drawn in held_out_documents(count, 8, seed=90)]
    names = ("prefix_ids", "query_ids", "continuation_ids")
    lines = [json.dumps({name: getattr(row, name) for name in names}) for row in rows]
    path.write_text("\n".join(lines))
    return str(path)


def run(app, *arguments):
    return CliRunner().invoke(app, [*PAIR, *map(str, arguments)], catch_exceptions=False)


def test_train_writes_a_mapper_and_its_curve(tmp_path):
    out, data = tmp_path / "out", written(tmp_path / "data.jsonl", 6)
    small = ["--steps", 3, "--batch", 2, "--held-out", 2, "--stem", 8, "--fused", 8]
    arguments = ["--mapper", MAPPERS / "ridge", "--data", data, "--out", out]
    result = run(train_app, *arguments, *small, "--loss", "ce+rkl", "--standardise")
    assert result.exit_code == 0, result.output
    card = verify_mapper(out)
    assert (card.training.steps, card.training.loss) == (3, "ce+rkl")
    assert card.training.settings["standardised"] is True
    assert (card.residual.stem, card.residual.fused) == (8, 8)
    assert card.training.data == "data.jsonl"
    assert (out / "training.csv").read_text().count("\n") == 3


def test_gate_writes_its_verdict_into_the_card(tmp_path):
    data = written(tmp_path / "data.jsonl", 3)
    for name, code in (("ridge", 1), ("cachelink", 0)):
        folder = tmp_path / name
        folder.mkdir()
        for file in (MAPPERS / name).iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        result = run(gate_app, "--mapper", folder, "--data", data)
        assert result.exit_code == code, result.output
        assert read_card(folder).gate.passed is (code == 0)
        assert read_card(folder).gate.text == "data.jsonl"


def test_an_empty_continuation_names_its_line(tmp_path):
    path = tmp_path / "data.jsonl"
    written(path, 2)
    path.write_text(path.read_text() + '\n{"prefix": "Ada", "query": "?", "continuation": ""}\n')
    arguments = ["--mapper", MAPPERS / "ridge", "--data", path, "--out", tmp_path / "out"]
    with pytest.raises(InvalidRequest, match=r"data\.jsonl:3: continuation is empty"):
        run(train_app, *arguments)


def test_a_wrong_loss_is_named_before_any_model_is_loaded(tmp_path):
    with pytest.raises(InvalidRequest, match=r"loss is 'mse'; it must be one of ce\+kl, ce, kl"):
        CliRunner().invoke(
            train_app,
            ["--mapper", "x", "--data", "x", "--out", "x", "--sender", "x", "--receiver", "x",
             "--loss", "mse"],
            catch_exceptions=False,
        )  # fmt: skip
