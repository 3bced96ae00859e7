"""Makes the pair's mappers and its figures: Ridge, residuals of three seeds, a penalised one."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec

from cachelink_bench.environment import environment
from cachelink_bench.recall_pair.pair import (
    MODELS,
    RESIDUAL,
    Pair,
    fit_ridge,
    load_pair,
    training_data,
)
from cachelink_bench.recall_pair.pair_eval import (
    CACHELINK,
    PairEvaluator,
    Scores,
    pair_gate,
    place,
    recovered,
)
from cachelink_core.fit.curves import CurvePoint, read_curve
from cachelink_core.fit.gate import GateResult
from cachelink_core.fit.train import CURVE_FILE, Memory, Trainer
from cachelink_core.fit.train_settings import TrainSettings
from cachelink_core.transport.artifact import CARD_FILE, load_state, save_mapper
from cachelink_core.transport.state import MapperState

RIDGE: Final = "Ridge"
PENALTY: Final = 0.1
DATA_SEED: Final = 0

VARIANTS: Final[dict[str, TrainSettings]] = {
    CACHELINK: RESIDUAL,
    f"{CACHELINK}, penalty {PENALTY:g}": dataclasses.replace(RESIDUAL, penalty=PENALTY),
    f"{CACHELINK}, seed 1": dataclasses.replace(RESIDUAL, seed=1),
    f"{CACHELINK}, seed 2": dataclasses.replace(RESIDUAL, seed=2),
}
"""The first one is committed; of the others only the figures are."""

Log = Callable[[str], None]


def build(work: Path, log: Log, models: Path = MODELS) -> None:
    """Fits, trains and judges whatever is not in ``work`` yet, and commits what is to be shipped.

    Args:
        work: folder of unfinished trainings, one folder a variant; may be left off and gone on with.
        log: gets lines of progress.
        models: folder of both checkpoints; mappers go into ``mappers`` in it.
    """
    pair = load_pair(models)
    memory: Memory = {}
    ridge = _ridge(pair, work, log)
    ship(pair, ridge, models / "mappers" / "ridge")
    for index, (name, settings) in enumerate(VARIANTS.items()):
        learned = _residual(pair, ridge, name, settings, work, memory, log)
        if index == 0:
            ship(pair, learned, models / "mappers" / "cachelink")
            log("shipped: ridge and cachelink, with their gates")


def ship(pair: Pair, state: MapperState, folder: Path) -> None:
    """Judges a mapper and writes it with its gate."""
    card = msgspec.structs.replace(state.card, gate=pair_gate(pair, state).record)
    save_mapper(folder, MapperState(card, state.tensors))


def evaluate(work: Path, log: Log, models: Path = MODELS) -> dict[str, Any]:
    """Figures of everything that is finished in ``work``, as plain data for a result file."""
    pair = load_pair(models)
    states = {RIDGE: load_state(work / "ridge")}
    states |= {
        name: load_state(folder)
        for name in VARIANTS
        if ((folder := work / folder_name(name)) / CARD_FILE).is_file()
    }
    gates = {}
    for name, state in states.items():
        gates[name] = pair_gate(pair, state)
        log(f"{name}: gate {'passed' if gates[name].record.passed else 'failed'}")
    mappers = {name: place(pair, state) for name, state in states.items()}
    scores = PairEvaluator(pair, mappers).scores()
    return {
        "environment": environment(),
        "settings": RESIDUAL.plain(),
        "penalty": PENALTY,
        "scores": _plain_scores(scores),
        "recovered": _plain_recovered(scores, [n for n in states if n != RIDGE]),
        "mappers": {n: _plain_mapper(states[n], gates[n]) for n in states},
        "curves": {n: _curve(work / folder_name(n)) for n in states if n != RIDGE},
    }


def write_json(path: Path, figures: dict[str, Any]) -> None:
    """Writes figures for programs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(figures, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def folder_name(variant: str) -> str:
    """A variant's folder: its name in lower case without marks."""
    return variant.lower().replace(",", "").replace(" ", "-")


def _ridge(pair: Pair, work: Path, log: Log) -> MapperState:
    folder = work / "ridge"
    if not (folder / CARD_FILE).is_file():
        work.mkdir(parents=True, exist_ok=True)
        save_mapper(folder, fit_ridge(pair, work))
        log("Ridge is fitted")
    return load_state(folder)


def _residual(
    pair: Pair,
    ridge: MapperState,
    name: str,
    settings: TrainSettings,
    work: Path,
    memory: Memory,
    log: Log,
) -> MapperState:
    folder = work / folder_name(name)
    if not (folder / CARD_FILE).is_file():
        data = training_data(DATA_SEED)
        trainer = Trainer(
            pair.sender, pair.receiver, ridge, data, settings, folder, resume=True, memory=memory
        )
        trainer.run(lambda point: log(_line(name, point)))
    return load_state(folder)


def _line(name: str, point: CurvePoint) -> str:
    return (
        f"{name}: step {point.step}, held out CE {point.held_out_ce:.3f}, "
        f"KL {point.held_out_kl:.3f}, same token {point.held_out_agreement:.3f}"
    )


def _curve(folder: Path) -> list[dict[str, float]]:
    return [
        {"step": point.step, "held_out_kl": point.held_out_kl, "held_out_ce": point.held_out_ce}
        for point in read_curve(folder / CURVE_FILE)
    ]


def _plain_scores(scores: Scores) -> dict[str, Any]:
    return {
        str(facts): {
            arm: {"recall": round(score.recall, 4), "kl": round(score.mean_kl, 4)}
            for arm, score in arms.items()
        }
        for facts, arms in scores.items()
    }


def _plain_recovered(scores: Scores, names: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in names:
        shares = {facts: recovered(arms, RIDGE, name) for facts, arms in scores.items()}
        found[name] = {
            str(facts): {"recall": round(recall, 4), "kl": round(kl, 4)}
            for facts, (recall, kl) in shares.items()
        }
    return found


def _plain_mapper(state: MapperState, gate: GateResult) -> dict[str, Any]:
    record, card = gate.record, state.card
    training = card.training
    return {
        "digest": card.digest,
        "layers": [list(layer.sources) for layer in card.layers],
        "r2_k": [layer.key.r2_held_out for layer in card.layers],
        "r2_v": [layer.value.r2_held_out for layer in card.layers],
        "steps": 0 if training is None else training.steps,
        "gate": msgspec.to_builtins(record),
        "relative_squared_l2": {
            f"{kind}.{layer}": round(sums.relative_squared_l2, 4)
            for (layer, kind), sums in gate.errors.items()
        },
    }
