"""The parts of a run: context classes by the model that they run on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from cachelink_bench.kept import bench_folder
from cachelink_bench.two_node.plan import TEXT, Plan
from cachelink_bench.two_node.subjects import LeftOut, Subject, beyond, make_subjects
from cachelink_core.engine.loading import load_engine
from cachelink_core.errors import ConfigError
from cachelink_core.identity import ModelIdentity
from cachelink_core.testing.wide_kv import WIDE, wide_kv_folder

NO_TEXT = "text and answers: the wide-KV model is bytes-only, its text means nothing"
NOT_HERE = "the wide-KV model runs on daemons that are started here (--emulate)"


@dataclass(frozen=True, slots=True)
class Part:
    """Context classes that run on one model.

    Attributes:
        plan: of this part alone.
        identity: of the model.
        subjects: the documents, the warm-up's first.
        bytes_only: whether the model is only moved, never asked.
    """

    plan: Plan
    identity: ModelIdentity
    subjects: tuple[Subject, ...]
    bytes_only: bool = False


def make_parts(
    plan: Plan, theirs: ModelIdentity | None, *, started_here: bool
) -> tuple[tuple[Part, ...], tuple[LeftOut, ...]]:
    """Cuts the documents, each class on a model that can read it.

    For daemons that are started here it also converts, writes and digests the models once.

    Args:
        plan: of the run.
        theirs: identity of daemons that run; None for those started here.
        started_here: whether a pair with the wide-KV model can be started.

    Raises:
        ConfigError: no class is left, one is too small, or ``plan.model`` cuts text otherwise than
            the daemons' model.
        CacheLinkError: the model cannot be loaded.
    """
    engine = load_engine(plan.model, device="cpu")
    identity = _checked(plan, engine.identity, theirs)
    out = beyond(plan.contexts, identity.max_positions)
    parts = []
    inside = tuple(name for name in plan.contexts if name not in {item.context for item in out})
    if inside:
        own = msgspec.structs.replace(plan, contexts=inside)
        subjects, _ = make_subjects(own, engine.tokens, identity.max_positions)
        parts.append(Part(own, identity, subjects))
    moved = tuple(name for name in plan.representations if name != TEXT)
    if plan.wide_kv and started_here and out and moved:
        names = tuple(item.context for item in out)
        wide, out = _wide_part(msgspec.structs.replace(plan, contexts=names, representations=moved))
        parts += wide
    elif plan.wide_kv and moved:
        out = tuple(LeftOut(item.context, f"{item.reason}; {NOT_HERE}") for item in out)
    if not parts:
        raise ConfigError(f"contexts: {'; '.join(item.reason for item in out)}")
    return tuple(parts), out


def _wide_part(plan: Plan) -> tuple[list[Part], tuple[LeftOut, ...]]:
    folder = wide_kv_folder(bench_folder() / "models", WIDE)
    plan = msgspec.structs.replace(plan, model=str(folder))
    out = beyond(plan.contexts, WIDE.positions)
    inside = tuple(name for name in plan.contexts if name not in {item.context for item in out})
    if not inside:
        return [], out
    plan = msgspec.structs.replace(plan, contexts=inside)
    engine = load_engine(plan.model, device="cpu")
    subjects, _ = make_subjects(plan, engine.tokens, WIDE.positions)
    part = Part(plan, engine.identity, subjects, bytes_only=True)
    return [part], (*out, *_without_text(plan))


def _without_text(plan: Plan) -> Iterator[LeftOut]:
    for name in plan.contexts:
        yield LeftOut(name, NO_TEXT)


def _checked(plan: Plan, ours: ModelIdentity, theirs: ModelIdentity | None) -> ModelIdentity:
    for field in ("vocabulary_digest", "template_digest"):
        if theirs is not None and getattr(ours, field) != getattr(theirs, field):
            raise ConfigError(
                f"--model {plan.model!r} cuts text otherwise than the daemons' model: {field} is "
                f"{getattr(ours, field)}, theirs {getattr(theirs, field)}"
            )
    return theirs or ours
