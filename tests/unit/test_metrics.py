"""The metrics' names, their closed labels, and that what is counted is what is exported."""

import re

import pytest

from cachelink_core.codec_spec import CODECS, PACKINGS
from cachelink_core.errors import ChecksumMismatch, all_errors
from cachelink_core.metrics import BYTE_BUCKETS, MetricInfo, Metrics
from cachelink_core.metrics import CODECS as CODEC_LABELS

UNIT = {
    "counter": r"cachelink_[a-z_]+_total",
    "histogram": r"cachelink_[a-z_]+_(seconds|bytes)",
    "gauge": r"cachelink_[a-z_]+",
}


@pytest.fixture
def metrics() -> Metrics:
    return Metrics("receiver")


def test_names_carry_prefix_and_unit(metrics: Metrics) -> None:
    assert len(set(metrics.names())) == len(metrics.names())
    for info in metrics.describe():
        assert re.fullmatch(UNIT[info.kind], info.name), info
        assert len(info.help) > 5
        assert {"id", "handoff_id", "cache_id", "tenant", "peer"}.isdisjoint(info.labels)


def test_both_roles_have_the_same_metrics(metrics: Metrics) -> None:
    assert metrics.names() == Metrics("sender").names()


def test_label_values_follow_the_code(metrics: Metrics) -> None:
    packed = {codec + ("" if p == "none" else f"+{p}") for codec in CODECS for p in PACKINGS}
    assert set(CODEC_LABELS) == packed
    reasons = [info.labels["reason"] for info in metrics.describe() if "reason" in info.labels]
    assert len(reasons) == 4
    assert all(set(values) == set(all_errors()) for values in reasons)


def test_a_label_outside_its_list_is_a_bug(metrics: Metrics) -> None:
    for labels in ({"reason": "boom"}, {"cause": "draining"}, {}):
        with pytest.raises(ValueError):
            metrics.errors.labels(**labels)


def test_counters_exist_at_zero(metrics: Metrics) -> None:
    for info in metrics.describe():
        if info.kind == "counter":
            first = {name: values[0] for name, values in info.labels.items()}
            assert metrics.value(info.name, **first) == 0


def test_histograms_count_and_sum(metrics: Metrics) -> None:
    metrics.transfer_seconds.labels(role="receiver", codec="int4+zstd").observe(0.25)
    metrics.handoff_bytes.observe(5000)
    labels = {"role": "receiver", "codec": "int4+zstd"}
    assert metrics.value("cachelink_transfer_seconds_sum", **labels) == 0.25
    assert metrics.value("cachelink_handoff_bytes_bucket", le="4096.0") == 0
    assert metrics.value("cachelink_handoff_bytes_bucket", le="16384.0") == 1
    assert (BYTE_BUCKETS[0], BYTE_BUCKETS[-1]) == (1024, 8 * 1024**3)


def test_failures_count_by_reason(metrics: Metrics) -> None:
    metrics.failed(ChecksumMismatch("x"))
    metrics.failed(ZeroDivisionError("a bug"))
    assert metrics.value("cachelink_errors_total", reason="checksum_mismatch") == 1
    assert metrics.value("cachelink_errors_total", reason="internal_error") == 1


def test_a_sample_that_is_not_there_is_an_error(metrics: Metrics) -> None:
    with pytest.raises(KeyError):
        metrics.value("cachelink_nothing_total")


@pytest.mark.parametrize(
    ("accept", "kind"), [("", "text/plain"), ("application/openmetrics-text", "openmetrics")]
)
def test_every_metric_is_exported(metrics: Metrics, accept: str, kind: str) -> None:
    def exported(info: MetricInfo) -> str:
        name = info.name.removesuffix("_total") if kind == "openmetrics" else info.name
        return f"# TYPE {name} {info.kind}\n"

    content_type, body = metrics.exposition(accept)
    assert kind in content_type
    text = body.decode()
    assert [info.name for info in metrics.describe() if exported(info) not in text] == []
    assert "process_resident_memory_bytes" in text


def test_two_daemons_in_one_process_do_not_mix() -> None:
    one, other = Metrics("sender"), Metrics("receiver")
    one.wire_bytes.inc(5)
    assert other.value("cachelink_wire_bytes_total") == 0
