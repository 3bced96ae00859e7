"""``python -m cachelink_bench.recall_pair pair …``: the mappers of the pair and their figures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cachelink_bench.recall_pair.pair import MODELS
from cachelink_bench.recall_pair.pair_build import build, evaluate, write_json
from cachelink_bench.recall_pair.pair_eval import set_deterministic
from cachelink_bench.recall_pair.pair_report import draw, page

pair_app = typer.Typer(help="Mappers between both models, and their figures.", no_args_is_help=True)

WorkOption = Annotated[Path, typer.Option(help="Folder of finished and unfinished trainings.")]
ModelsOption = Annotated[Path, typer.Option(help="Folder of both checkpoints.")]


@pair_app.command("build")
def build_command(work: WorkOption, models: ModelsOption = MODELS) -> None:
    """Fit Ridge and train the residuals, or go on where that was left off."""
    set_deterministic()
    build(work, _log, models)


@pair_app.command("evaluate")
def evaluate_command(
    work: WorkOption,
    out: Annotated[Path, typer.Option(help="Folder for recall_pair.json, .md and .png.")],
    models: ModelsOption = MODELS,
) -> None:
    """Measure every mapper on held-out documents and write the results."""
    set_deterministic()
    figures = evaluate(work, _log, models)
    write_json(out / "recall_pair.json", figures)
    (out / "recall_pair.md").write_text(page(figures), encoding="utf-8")
    draw(figures, out / "recall_pair.png")


def _log(line: str) -> None:
    print(line, flush=True)
