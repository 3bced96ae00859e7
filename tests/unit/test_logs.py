"""Log lines: fields, context, both formats, and that no traceback shows a variable."""

import io
import json
import logging
import threading
from collections.abc import Iterator

import pytest

from cachelink_core import logs
from cachelink_core.errors import ConfigError


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    level = root.level
    text = io.StringIO()
    handler = logs.install("info", "json", text)
    yield text
    root.removeHandler(handler)
    root.setLevel(level)
    logging.captureWarnings(False)


def lines(stream: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_line_has_its_event_fields_and_context(stream: io.StringIO) -> None:
    log = logs.logger("cachelink_core.test")
    with logs.bound(handoff_id="h1", tenant="alice"), logs.bound(cache_id="c1"):
        log.info("installed", tokens=7, what="ü")
    log.warning("later")
    first, second = lines(stream)
    assert first.pop("timestamp", "").endswith("Z")
    assert first == {
        "event": "installed",
        "level": "info",
        "logger": "cachelink_core.test",
        "handoff_id": "h1",
        "cache_id": "c1",
        "tenant": "alice",
        "tokens": 7,
        "what": "ü",
    }
    assert "handoff_id" not in second


def test_context_stays_in_its_thread(stream: io.StringIO) -> None:
    log = logs.logger("t")
    with logs.bound(handoff_id="h1"):
        worker = threading.Thread(target=lambda: log.info("elsewhere"))
        worker.start()
        worker.join()
    assert "handoff_id" not in lines(stream)[0]


def test_only_known_fields_can_be_bound() -> None:
    with pytest.raises(TypeError, match="document"), logs.bound(document="secret"):
        pass


def test_levels_filter_and_other_libraries_join(stream: io.StringIO) -> None:
    logs.logger("t").debug("unseen")
    logging.getLogger("grpc").warning("from %s", "elsewhere")
    (line,) = lines(stream)
    assert (line["event"], line["logger"], line["level"]) == ("from elsewhere", "grpc", "warning")


def test_installing_again_replaces(stream: io.StringIO) -> None:
    other = io.StringIO()
    handler = logs.install("error", "console", other)
    try:
        logs.logger("t").warning("below")
        logs.logger("t").error("seen", n=1)
        assert stream.getvalue() == ""
        assert "below" not in other.getvalue()
        assert "seen" in other.getvalue()
        assert "n=1" in other.getvalue()
        assert "\x1b" not in other.getvalue()
    finally:
        logging.getLogger().removeHandler(handler)


@pytest.mark.parametrize("fmt", ["json", "console"])
def test_tracebacks_show_no_variables(stream: io.StringIO, fmt: logs.LogFormat) -> None:
    handler = logs.install("info", fmt, stream)

    def fail(count: int) -> None:
        document = "very-private-" * count  # noqa: F841
        raise RuntimeError("broken")

    try:
        try:
            fail(2)
        except RuntimeError:
            logs.logger("t").exception("failed")
    finally:
        logging.getLogger().removeHandler(handler)
    assert "RuntimeError" in stream.getvalue()
    assert "broken" in stream.getvalue()
    assert "very-private-very" not in stream.getvalue()


def test_a_wrong_setting_is_named() -> None:
    with pytest.raises(ConfigError, match="'loud'"):
        logs.install("loud", "json")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="'xml'"):
        logs.install("info", "xml", io.StringIO())  # type: ignore[arg-type]
