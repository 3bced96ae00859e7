"""The card of a mapper: what it refuses, and what its digest covers."""

import msgspec
import pytest

from cachelink_core.errors import IdentityMismatch, ManifestError
from cachelink_core.identity import LayerGeometry
from cachelink_core.testing.handoffs import SLIDING, identity
from cachelink_core.transport.card import (
    Card,
    GateRecord,
    KindFit,
    LayerFit,
    decode_card,
    encode_card,
    local_heads,
)
from cachelink_core.transport.pairing import check_pair, check_same_tokenizer

FULL = LayerGeometry(kv_heads=2, head_dim=8)
SENDER = identity((FULL, FULL, SLIDING))
RECEIVER = msgspec.structs.replace(identity((FULL, FULL)), weights_digest="7" * 64)


def card(**changes):
    fields = {
        "sender": SENDER,
        "receiver": RECEIVER,
        "layers": (LayerFit(sources=(0,)), LayerFit(sources=(0, 1))),
    }
    return Card(**(fields | changes))


def signed(**changes):
    found = card(**changes)
    return msgspec.structs.replace(found, digest=found.compute_digest())


def test_json_keeps_everything():
    gate = GateRecord(
        passed=False, threshold=0.5, kl={"mapped": 1.0}, tokens=3, text="t", text_digest="0" * 64
    )
    held = KindFit(ridge_lambda=0.1, r2_in_sample=0.7, r2_held_out=None)
    written = signed(gate=gate, layers=(LayerFit(sources=(0,), key=held),) * 2, bos_id=1)
    assert decode_card(encode_card(written)) == written


def test_the_digest_covers_every_other_field():
    base = card()
    changed = [
        card(bos_id=1),
        card(heads=((0,), (1,))),
        card(tensors={"a": "0" * 64}),
        card(sender=msgspec.structs.replace(SENDER, weights_digest="8" * 64)),
        card(layers=(LayerFit(sources=(1,)), LayerFit(sources=(0, 1)))),
    ]
    digests = {found.compute_digest() for found in (base, *changed)}
    assert len(digests) == 1 + len(changed)
    assert signed().compute_digest() == base.compute_digest()


def test_an_edited_card_is_refused():
    text = encode_card(signed()).replace(b'"float32"', b'"bfloat16"', 1)
    with pytest.raises(ManifestError, match="digest"):
        decode_card(text)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"schema": 2}, "schema is 2; this version reads 1"),
        ({"layers": (LayerFit(sources=(0,)),)}, "1 entries; the receiver has 2"),
        ({"layers": (LayerFit(sources=(1, 0)),) * 2}, "ascending"),
        ({"layers": (LayerFit(sources=(0, 0)),) * 2}, "ascending"),
        ({"layers": (LayerFit(sources=(3,)),) * 2}, "layer 3; the sender has 3"),
        ({"layers": (LayerFit(sources=(2,)),) * 2}, "window of 24"),
        ({"heads": ((0,),)}, "1 entries; receiver layers have"),
        ({"heads": ((0,), (2,))}, "sender head 2; the sender has 2"),
        ({"heads": ((0,), (0, 1))}, "equally many"),
        ({"heads": ((), ())}, "equally many"),
    ],
)
def test_a_contradicting_card_names_the_field(changes, words):
    with pytest.raises(ManifestError, match=words):
        card(**changes).check()


def test_malformed_json_is_a_manifest_error():
    for data in (b"", b"[]", b'{"sender": 1}'):
        with pytest.raises(ManifestError, match="card"):
            decode_card(data)


@pytest.mark.parametrize("sender", range(1, 9))
@pytest.mark.parametrize("receiver", range(1, 9))
def test_paired_heads_read_equally_many_and_leave_none_out(sender, receiver):
    pairing = local_heads(sender, receiver)
    assert len(pairing) == receiver
    assert len({len(read) for read in pairing}) == 1
    assert {head for read in pairing for head in read} <= set(range(sender))
    if sender % receiver == 0 or receiver % sender == 0:
        assert {head for read in pairing for head in read} == set(range(sender))
    if sender == receiver:
        assert pairing == tuple((head,) for head in range(sender))


def test_a_mapper_fits_its_pair_whatever_the_template():
    check_pair(card(), SENDER, RECEIVER)
    other = msgspec.structs.replace(SENDER, template_digest="9" * 64, max_positions=17)
    check_pair(card(), other, RECEIVER)


@pytest.mark.parametrize("role", ["sender", "receiver"])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("weights_digest", "9" * 64),
        ("config_digest", "9" * 64),
        ("vocabulary_digest", "9" * 64),
        ("adapter_digest", "9" * 64),
        ("dtype", "float32"),
        ("rope", {"rope_type": "yarn"}),
        ("architecture", "OtherForCausalLM"),
    ],
)
def test_another_model_is_refused_by_field(role, field, value):
    models = {"sender": SENDER, "receiver": RECEIVER}
    models[role] = msgspec.structs.replace(models[role], **{field: value})
    with pytest.raises(IdentityMismatch, match=rf"{role}\.{field}") as caught:
        check_pair(card(), **models)
    assert all(diff.field.startswith(f"{role}.{field}") for diff in caught.value.diffs)


def test_the_reverse_direction_is_called_by_its_name():
    with pytest.raises(IdentityMismatch, match="reverse direction"):
        check_pair(card(), RECEIVER, SENDER)


def test_two_tokenizers_are_refused_by_name():
    check_same_tokenizer(SENDER, RECEIVER)
    other = msgspec.structs.replace(RECEIVER, vocabulary_digest="9" * 64)
    with pytest.raises(IdentityMismatch, match=r"tokenizers differ.*vocabulary_digest") as caught:
        check_same_tokenizer(SENDER, other)
    assert [diff.field for diff in caught.value.diffs] == ["vocabulary_digest"]
