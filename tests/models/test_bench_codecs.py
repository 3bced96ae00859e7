"""``cachelink-bench codecs`` runs, and its smallest run already shows what the full one measures."""

from __future__ import annotations

import json

import pytest

from cachelink_bench import codecs

pytestmark = [pytest.mark.smollm2, pytest.mark.slow]


@pytest.fixture(scope="module")
def document(tmp_path_factory) -> dict:
    path = tmp_path_factory.mktemp("bench") / "codecs.json"
    assert codecs.main(["--smoke", "--json", str(path)]) == 0
    return json.loads(path.read_text())


def test_the_document_says_what_was_run(document):
    assert document["benchmark"] == "codecs"
    assert document["config"]["prefix_tokens"] == 256
    assert document["config"]["text"] == ["prose"]
    assert {"torch", "transformers", "zstandard"} <= document["environment"]["packages"].keys()


def test_lossless_arms_change_nothing_and_int4_beats_the_first_try(document):
    arms = document["texts"][0]["arms"]
    assert arms["native"]["kl_nats"] == 0.0
    assert arms["native+zstd"]["kl_nats"] == 0.0
    assert arms["native+zstd"]["bytes_sent"] <= 0.68 * arms["native"]["bytes_sent"]
    assert arms["int8"]["bits_per_element"] < 9
    assert arms["int4"]["kl_nats"] < 0.6 * arms["int4 per token"]["kl_nats"]


def test_a_key_bias_ruins_the_first_try_and_not_int4(document):
    arms = document["texts"][0]["arms"]
    for bias in ("50", "300"):
        assert arms[f"int4 per token, bias {bias}"]["top1"] < 0.5
        assert arms[f"int4, bias {bias}"]["top1"] > 0.9


def test_every_timed_arm_has_rates(document):
    rates = document["texts"][0]["gb_per_s"]
    assert {"native", "int8", "int4", "int4+zstd"} <= rates.keys()
    assert all(value > 0 for speed in rates.values() for value in speed.values())
