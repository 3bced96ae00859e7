"""Does a mapper fit these two models? Every "no" names the fields. Pure data, no torch."""

from __future__ import annotations

from typing import Final

from cachelink_core.errors import IdentityMismatch
from cachelink_core.identity import FieldDiff, ModelIdentity, diff
from cachelink_core.transport.card import Card

NOT_THE_MAPPERS_BUSINESS: Final = frozenset({"template_digest", "max_positions"})
"""They decide which tokens are read and how many, not what the cache of a token is."""


def check_pair(card: Card, sender: ModelIdentity, receiver: ModelIdentity) -> None:
    """Checks that a mapper was made for this sender and this receiver.

    Raises:
        IdentityMismatch: another model on either side, with each differing field; or the mapper of
            the reverse direction, which is said.
    """
    diffs = differences(card, sender, receiver)
    if not diffs:
        return
    if not differences(card, receiver, sender):
        raise IdentityMismatch(
            diffs,
            "the mapper is of the reverse direction: it reads the cache of "
            f"{_name(card.sender)} and writes that of {_name(card.receiver)}; "
            f"wanted is {_name(sender)} to {_name(receiver)}",
        )
    raise IdentityMismatch(diffs)


def differences(
    card: Card, sender: ModelIdentity, receiver: ModelIdentity
) -> tuple[FieldDiff, ...]:
    """Every field in which the mapper's models differ from these, prefixed by their role."""
    pairs = (("sender", card.sender, sender), ("receiver", card.receiver, receiver))
    return tuple(
        FieldDiff(f"{role}.{found.field}", found.ours, found.theirs)
        for role, ours, theirs in pairs
        for found in diff(ours, theirs)
        if found.field not in NOT_THE_MAPPERS_BUSINESS
    )


def check_same_tokenizer(sender: ModelIdentity, receiver: ModelIdentity) -> None:
    """Refuses a pair whose token ids mean different things: a mapper is per token.

    Raises:
        IdentityMismatch: the vocabularies differ.
    """
    if sender.vocabulary_digest != receiver.vocabulary_digest:
        found = FieldDiff("vocabulary_digest", receiver.vocabulary_digest, sender.vocabulary_digest)
        raise IdentityMismatch(
            (found,),
            f"the tokenizers differ ({found}): a mapper translates token by token, "
            "so both models must read the same ids",
        )


def _name(identity: ModelIdentity) -> str:
    return f"{identity.architecture} {identity.weights_digest[:12]}"
