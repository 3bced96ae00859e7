"""Two nodes compared field by field."""

from dataclasses import replace

import msgspec
import pytest

from cachelink_core.cli.ping import Difference, compare, describe_layers
from cachelink_core.identity import LayerGeometry
from cachelink_core.rpc.client import NodeInfo
from cachelink_core.testing import handoffs

NODE = NodeInfo("sender", "0.1.0", 1, "epoch", handoffs.identity(), "m", ("native",), ("none",))


def other(**changes) -> NodeInfo:
    return replace(NODE, identity=msgspec.structs.replace(NODE.identity, **changes))


def test_equal_nodes_fit():
    assert compare(NODE, replace(NODE, role="receiver", version="9", epoch="x")) == ()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("architecture", "Other"),
        ("config_digest", "f" * 64),
        ("weights_digest", "f" * 64),
        ("dtype", "float16"),
        ("vocabulary_digest", "f" * 64),
        ("template_digest", "f" * 64),
        ("max_positions", 7),
        ("adapter_digest", "f" * 64),
    ],
)
def test_each_field_is_named_with_both_values(field, value):
    ours = str(getattr(NODE.identity, field))
    assert compare(NODE, other(**{field: value})) == (Difference(field, ours, str(value)),)


def test_rope_and_layers_are_named_down_to_the_value():
    layers = NODE.identity.layers
    narrow = msgspec.structs.replace(layers[0], head_dim=4, rotary_dim=4)
    found = compare(NODE, other(rope={"theta": 1.0}, layers=(narrow, *layers[1:])))
    assert {"layers[0].head_dim", "rope.theta"} <= {each.field for each in found}


def test_a_newer_manifest_schema_of_the_sender_is_a_difference():
    newer = replace(NODE, schema_version=2)
    assert compare(newer, NODE) == (Difference("schema_version", "2", "1"),)
    assert compare(NODE, newer) == ()


def test_equal_neighbours_are_counted():
    full = LayerGeometry(2, 64, rotary_dim=64)
    sliding = LayerGeometry(2, 64, "sliding", 128, rotary_dim=64)
    assert describe_layers((full, full, sliding, full)) == (
        "2 × full, 2 heads of 64, keys half; 1 × sliding over 128, 2 heads of 64, keys half; "
        "1 × full, 2 heads of 64, keys half"
    )
