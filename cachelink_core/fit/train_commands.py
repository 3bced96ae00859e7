"""``cachelink train``, ``gate`` and ``convert``. Nothing heavy is imported before a command runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

if TYPE_CHECKING:
    from cachelink_core.fit.curves import CurvePoint
    from cachelink_core.transport.card import GateRecord

train_app = typer.Typer(help="Train the residual of a mapper through the frozen receiver.")
gate_app = typer.Typer(help="Judge a mapper on held-out text, and write the result into its card.")
convert_app = typer.Typer(help="Make training lines of a public data set.")

MapperOption = Annotated[Path, typer.Option(help="Folder of the mapper.")]
SenderOption = Annotated[str, typer.Option(help="Model whose cache is read.")]
ReceiverOption = Annotated[str, typer.Option(help="Model whose cache is written.")]
DtypeOption = Annotated[str, typer.Option(help="Of both models.")]
DeviceOption = Annotated[str, typer.Option(help="Of both models.")]
ChatOption = Annotated[
    bool | None,
    typer.Option("--chat/--no-chat", help="Documents in the chat template, or plain."),
]


@train_app.callback(invoke_without_command=True)
def train_command(
    mapper: MapperOption,
    data: Annotated[Path, typer.Option(help="JSONL with prefix, query and continuation.")],
    sender: SenderOption,
    receiver: ReceiverOption,
    out: Annotated[Path, typer.Option(help="Folder for the trained mapper, curve, checkpoint.")],
    held_out: Annotated[int, typer.Option(min=1, help="Examples to evaluate on.")] = 32,
    steps: Annotated[int, typer.Option(help="Of the optimiser.")] = 600,
    batch: Annotated[int, typer.Option(help="Examples a step.")] = 2,
    rows: Annotated[int, typer.Option(help="Of them together in memory.")] = 1,
    loss: Annotated[str, typer.Option(help="ce+kl, ce, kl, rkl or ce+rkl.")] = "ce+kl",
    kl_weight: Annotated[float, typer.Option(help="Of the divergence beside the entropy.")] = 1.0,
    temperature: Annotated[float, typer.Option(help="Of the divergence.")] = 1.0,
    count: Annotated[
        str, typer.Option(help="Tokens that count: continuation or query+continuation.")
    ] = "continuation",
    average: Annotated[str, typer.Option(help="Over each example or each token.")] = "example",
    penalty: Annotated[float, typer.Option(help="Of the residual's size beside Ridge's.")] = 0.0,
    stem: Annotated[int, typer.Option(help="Units of each of the two stems.")] = 256,
    fused: Annotated[int, typer.Option(help="Units behind them.")] = 512,
    standardise: Annotated[
        bool, typer.Option("--standardise", help="Standardise the residual's inputs.")
    ] = False,
    standardise_examples: Annotated[int, typer.Option(help="From how many examples.")] = 64,
    learning_rate: Annotated[float, typer.Option(help="Of AdamW.")] = 1e-4,
    schedule: Annotated[str, typer.Option(help="cosine, linear or constant.")] = "cosine",
    warm_up: Annotated[float, typer.Option(help="Share of the steps.")] = 0.05,
    weight_decay: Annotated[float, typer.Option(help="On weights, not on biases.")] = 0.01,
    beta1: Annotated[float, typer.Option(help="Of AdamW.")] = 0.9,
    beta2: Annotated[float, typer.Option(help="Of AdamW.")] = 0.999,
    clip: Annotated[float, typer.Option(help="Largest gradient norm; 0 for no limit.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of weights, split and order.")] = 0,
    evaluate_every: Annotated[int, typer.Option(help="Steps between evaluations.")] = 50,
    save_every: Annotated[int, typer.Option(help="Steps between checkpoints.")] = 100,
    chat: ChatOption = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    resume: Annotated[bool, typer.Option("--resume", help="Go on from a checkpoint.")] = False,
) -> None:
    """Train the residual of a mapper through the frozen receiver; Ridge stays as it is."""
    from cachelink_core.engine.loading import load_engine
    from cachelink_core.fit.train import Trainer
    from cachelink_core.fit.train_data import (
        TrainingData,
        data_digest,
        read_examples,
        split_held_out,
    )
    from cachelink_core.fit.train_settings import TrainSettings
    from cachelink_core.transport.artifact import load_state

    settings = TrainSettings(
        steps=steps,
        batch=batch,
        rows=rows,
        loss=loss,  # type: ignore[arg-type]  # checked there
        kl_weight=kl_weight,
        temperature=temperature,
        count=count,  # type: ignore[arg-type]
        average=average,  # type: ignore[arg-type]
        penalty=penalty,
        stem=stem,
        fused=fused,
        standardised=standardise,
        standardise_examples=standardise_examples,
        learning_rate=learning_rate,
        schedule=schedule,  # type: ignore[arg-type]
        warm_up=warm_up,
        weight_decay=weight_decay,
        beta1=beta1,
        beta2=beta2,
        clip=clip,
        seed=seed,
        evaluate_every=evaluate_every,
        save_every=save_every,
    )
    state = load_state(mapper)
    engines = [load_engine(name, dtype=dtype, device=device) for name in (sender, receiver)]
    examples = read_examples(
        data, engines[1].tokens, chat=chat, max_tokens=engines[1].identity.max_positions
    )
    parts = split_held_out(examples, held_out, seed)
    trainer = Trainer(
        engines[0],
        engines[1],
        state,
        TrainingData(data.name, data_digest(examples), *parts),
        settings,
        out,
        resume=resume,
    )
    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    with Progress(*columns, TimeRemainingColumn(), console=console) as bars:
        task = bars.add_task("training", total=steps)

        def told(point: CurvePoint) -> None:
            bars.update(task, completed=point.step)
            bars.console.print(_line(point))

        card = trainer.run(told)
    assert card is not None, "nobody asked it to stop"
    console.print(f"{out}: {card.digest[:16]}; judge it with: cachelink gate --mapper {out} …")


@gate_app.callback(invoke_without_command=True)
def gate_command(
    mapper: MapperOption,
    data: Annotated[Path, typer.Option(help="Held-out JSONL, never fitted or trained on.")],
    sender: SenderOption,
    receiver: ReceiverOption,
    threshold: Annotated[float, typer.Option(help="Share of the worse arms' KL.")] = 0.5,
    limit: Annotated[int, typer.Option(min=0, help="Examples at most; 0 for all.")] = 0,
    chat: ChatOption = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
) -> None:
    """Judge a mapper on held-out text, and write the result into its card.

    It passes if the mean next-token KL to the native receiver is at most THRESHOLD times the smaller
    of a mismatched and a zeroed cache's. Exit code 1 if it does not.
    """
    from cachelink_core.engine.loading import load_engine
    from cachelink_core.fit.gate import gate_artifact
    from cachelink_core.fit.train_data import read_examples

    engines = [load_engine(name, dtype=dtype, device=device) for name in (sender, receiver)]
    examples = read_examples(data, engines[1].tokens, chat=chat)
    card, _ = gate_artifact(
        mapper,
        engines[0],
        engines[1],
        examples[:limit] if limit else examples,
        text=data.name,
        threshold=threshold,
    )
    assert card.gate is not None, "it was written just now"
    Console(stderr=True).print(gate_table(card.gate))
    if not card.gate.passed:
        raise typer.Exit(1)


@convert_app.callback(invoke_without_command=True)
def convert_command(
    name: Annotated[
        str,
        typer.Option(
            "--as",
            help="commonsense_qa, cosmos_qa, squad_v2, drop, multidoc2dial, contract_nli or "
            "long_align.",
        ),
    ],
    source: Annotated[str, typer.Option(help="JSONL of rows, or a data set on the hub.")],
    out: Annotated[Path, typer.Option(help="JSONL for cachelink train, replaced.")],
    limit: Annotated[int, typer.Option(min=0, help="Lines at most; 0 for all.")] = 0,
    max_chars: Annotated[
        int, typer.Option(min=0, help="Longest prefix in characters; 0 for any.")
    ] = 0,
) -> None:
    """Make training lines (prefix, query, continuation) of a public data set's rows."""
    from cachelink_core.fit.converters import convert

    count = convert(name, source, out, limit=limit or None, max_chars=max_chars or None)
    Console(stderr=True).print(f"{out}: {count} lines")


def gate_table(gate: GateRecord) -> Table:
    """A gate for people: what decided above, what did not below."""
    verdict = "passed" if gate.passed else "FAILED"
    table = Table("figure", "value", title=f"gate {verdict}", title_justify="left")
    for arm, value in gate.kl.items():
        table.add_row(f"KL to native, {arm} cache", f"{value:.4f} nats")
    bound = gate.threshold * min(gate.kl["mismatched"], gate.kl["zeroed"])
    table.add_row("mapped must not exceed", f"{bound:.4f} nats", end_section=True)
    if gate.worst_layer is not None:
        cosines = gate.attention_cosine
        table.add_row("attention-output cosine, mean", f"{sum(cosines) / len(cosines):.3f}")
        table.add_row(f"worst layer, {gate.worst_layer}", f"{cosines[gate.worst_layer]:.3f}")
    for name, value in sorted(gate.reported.items()):
        table.add_row(name, f"{value:.4g}")
    return table


def _line(point: CurvePoint) -> str:
    train = "" if point.train_loss is None else f"loss {point.train_loss:.4f}, "
    return (
        f"step {point.step}: {train}held out: CE {point.held_out_ce:.4f}, "
        f"KL {point.held_out_kl:.4f}, same token {point.held_out_agreement:.3f}"
    )
