"""Commands that build the recall pair."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer
from transformers import AutoModelForCausalLM

from cachelink_bench.recall_pair.base_training import BaseTrainer
from cachelink_bench.recall_pair.models import BASE_SEEDS, SHAPES, Role
from cachelink_bench.recall_pair.pair_commands import pair_app
from cachelink_bench.recall_pair.plan import BaseTraining
from cachelink_bench.recall_pair.plot import plot_curves
from cachelink_bench.recall_pair.recall import recall, stop_rate
from cachelink_bench.recall_pair.task import held_out_documents

app = typer.Typer(help=__doc__, no_args_is_help=True, pretty_exceptions_show_locals=False)
app.add_typer(pair_app, name="pair")

DEFAULT_STEPS = 1_600
EVALUATE_SEED = 1
EVALUATE_FACTS = (1, 2, 4, 8, 16, 32, 64)


@app.command("train-base")
def train_base(
    role: Annotated[Role, typer.Option(help="Which model of the pair.")],
    out: Annotated[Path, typer.Option(help="Folder of state, curve and model.")],
    seed: Annotated[int | None, typer.Option(help="Default: that of the committed model.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = DEFAULT_STEPS,
    threads: Annotated[int, typer.Option(min=1, help="More than one: other rounding.")] = 1,
) -> None:
    """Train one model from scratch, or go on where a stopped training left off."""
    torch.use_deterministic_algorithms(mode=True)
    torch.set_num_threads(threads)
    plan = BaseTraining(SHAPES[role], BASE_SEEDS[role] if seed is None else seed, steps)
    BaseTrainer(plan, out).run(lambda line: print(line, flush=True))


@app.command("plot")
def plot(
    sender: Annotated[list[Path], typer.Option(help="Curve of a sender; the first stands out.")],
    receiver: Annotated[list[Path], typer.Option(help="Curve of a receiver, likewise.")],
    out: Annotated[Path, typer.Option(help="PNG file.")],
) -> None:
    """Draw the training curves of both models over their seeds."""
    plot_curves({"sender": sender, "receiver": receiver}, out)


@app.command("evaluate")
def evaluate(
    model: Annotated[Path, typer.Argument(help="Folder of a trained model.")],
    documents: Annotated[int, typer.Option(min=1, help="Held-out documents for each row.")] = 64,
    queries: Annotated[int, typer.Option(min=1, help="Asked of each document.")] = 8,
    seed: Annotated[int, typer.Option(help="Of the documents.")] = EVALUATE_SEED,
) -> None:
    """Print how a trained model does on held-out documents, in bfloat16 and float32."""
    torch.set_num_threads(1)
    print("| dtype | facts | recall | answers ended |\n|---|---|---|---|")
    for dtype in (torch.bfloat16, torch.float32):
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
        for facts in EVALUATE_FACTS:
            drawn = held_out_documents(documents, facts, seed)
            right, ended = recall(loaded, drawn, queries), stop_rate(loaded, drawn, queries)
            print(f"| {dtype} | {facts} | {right:.4f} | {ended:.4f} |", flush=True)
