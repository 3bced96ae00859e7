"""``cachelink-bench transport`` runs, counts right, and fails loudly."""

import json

import pytest
import torch

from cachelink_bench import __main__ as bench
from cachelink_bench.peak_memory import peak_extra_bytes
from cachelink_bench.transport import main
from cachelink_bench.transport_shapes import BareGemms, make_subject, pair_card, pair_names
from cachelink_core.errors import ConfigError

CPU = torch.device("cpu")


def test_a_smoke_run_writes_its_figures(tmp_path, capsys):
    path = tmp_path / "result.json"
    arguments = ["--smoke", "--pair", "yi1.5-9b-34b", "--block-tokens", "128", "--json", str(path)]
    assert main(arguments) == 0
    document = json.loads(path.read_text())
    assert [row["form"] for row in document["results"]] == ["Ridge", "CacheLink"]
    for row in document["results"]:
        assert row["layers"] == 1
        assert set(row["us_per_token"]) == {"write", "map", "gemm", "rope"}
        assert row["ratio"] == pytest.approx(
            row["us_per_token"]["map"] / row["us_per_token"]["gemm"]
        )
        assert row["block_bytes"] == 2 * 4 * 128 * 48 * 4 * 128
    ridge, full = document["results"]
    assert ridge["flop_per_token"] == 2 * 2 * 8 * 512 * 1024
    assert full["flop_per_token"] > ridge["flop_per_token"]
    assert "map/gemm" in capsys.readouterr().out


def test_bare_gemms_count_what_the_mapper_does():
    subject = make_subject(pair_card("qwen3-14b-32b"), 1, torch.bfloat16, CPU, residual=True)
    inputs, hidden, outputs = 8_192, 512, 1_024
    expected = 2 * inputs * (outputs + 256) + hidden * hidden + hidden * 2 * outputs
    assert BareGemms(subject, 128).flops == 2 * 128 * expected
    assert subject.mapper.nbytes > 4 * expected - 4 * hidden * hidden


def test_an_unknown_pair_is_named(capsys):
    assert bench.main(["transport", "--pair", "nobody"]) == 1
    error = capsys.readouterr().err
    assert "'nobody' is unknown" in error
    assert all(name in error for name in pair_names())
    with pytest.raises(ConfigError):
        pair_card("missing.json")


def test_peak_memory_sees_a_large_tensor():
    size = 256 * 2**20
    found = peak_extra_bytes(lambda: torch.ones(size // 4), CPU)
    if found is None:
        pytest.fail("this system does not tell its peak memory")
    assert 0.9 * size < found < 1.3 * size
