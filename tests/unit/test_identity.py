"""Identities and how they differ."""

import msgspec
import pytest

from cachelink_core.identity import FieldDiff, LayerGeometry, ModelIdentity, diff
from cachelink_core.testing import handoffs

OURS = handoffs.identity()


def changed(**changes) -> ModelIdentity:
    return msgspec.structs.replace(OURS, **changes)


def test_an_identity_does_not_differ_from_itself():
    assert diff(OURS, handoffs.identity()) == ()
    assert OURS.digest() == handoffs.identity().digest()


def test_every_field_is_part_of_the_digest_and_is_named():
    changes = {
        "architecture": "OtherForCausalLM",
        "config_digest": "a" * 64,
        "weights_digest": "a" * 64,
        "dtype": "float32",
        "vocabulary_digest": "a" * 64,
        "template_digest": "a" * 64,
        "rope": {"rope_type": "yarn", "rope_theta": 10_000.0},
        "layers": OURS.layers[:2],
        "max_positions": 1,
        "adapter_digest": "a" * 64,
    }
    assert set(changes) == set(ModelIdentity.__struct_fields__)
    for name, value in changes.items():
        theirs = changed(**{name: value})
        assert theirs.digest() != OURS.digest(), name
        (found,) = diff(OURS, theirs)
        assert found.field.partition(".")[0] == name
        assert found.ours != found.theirs


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kv_heads", 4),
        ("head_dim", 16),
        ("attention", "sliding"),
        ("window", 7),
        ("key_layout", "interleaved"),
        ("rotary_dim", 4),
    ],
)
def test_a_layer_that_differs_is_named_with_its_field(field, value):
    layers = list(OURS.layers)
    layers[2] = msgspec.structs.replace(layers[2], **{field: value})
    (found,) = diff(OURS, changed(layers=tuple(layers)))
    assert found.field == f"layers[2].{field}"
    assert found.theirs == str(value)
    assert set(LayerGeometry.__struct_fields__) >= {field}


def test_rope_fields_are_named_also_when_absent():
    theirs = changed(rope={"rope_type": "linear", "factor": 2.0, "rope_theta": 10_000.0})
    assert diff(OURS, theirs) == (
        FieldDiff("rope.factor", "absent", "2.0"),
        FieldDiff("rope.rope_type", "default", "linear"),
    )
    assert str(diff(OURS, theirs)[0]) == "rope.factor: ours absent, theirs 2.0"


def test_the_order_of_rope_fields_is_no_difference():
    theirs = changed(rope=dict(reversed(list(OURS.rope.items()))))
    assert theirs.digest() == OURS.digest()
    assert diff(OURS, theirs) == ()


def test_a_sliding_layer_forgets():
    layer = LayerGeometry(kv_heads=1, head_dim=1, attention="sliding", window=4)
    assert [layer.first_token(n) for n in (0, 3, 4, 10)] == [0, 0, 1, 7]
    assert LayerGeometry(kv_heads=1, head_dim=1).first_token(10**6) == 0


def test_bytes_of_a_token():
    assert LayerGeometry(kv_heads=3, head_dim=64).token_bytes("bfloat16") == 2 * 3 * 64 * 2
    assert OURS.token_bytes() == sum(layer.token_bytes("bfloat16") for layer in OURS.layers)
