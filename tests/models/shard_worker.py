"""One process of a shared pass, started by torchrun: ``shard_worker.py OUT SEQUENCES``."""

import sys
from pathlib import Path

import torch

from cachelink_core.fit.measure import measure
from cachelink_core.fit.panels import full_panel
from cachelink_core.fit.shards import joined
from tests.models.fit_pairs import calibration, planted_engines


def main(out: str, sequences: str) -> None:
    torch.set_num_threads(1)
    sender, receiver, _ = planted_engines("qwen2")
    text = calibration(sender.tokens, sequences=int(sequences), length=48)
    panel = full_panel(sender.identity.layers, receiver.identity.layers)
    with joined() as shards:
        measured = measure(
            sender,
            receiver,
            text,
            (panel,),
            checkpoint=Path(f"{out}.checkpoint.{shards.rank}"),
            shards=shards,
        )
        if shards.rank == 0:
            measured.save(Path(out))


main(*sys.argv[1:])
