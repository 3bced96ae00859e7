"""From a file, an environment and flags to a configuration, and back to YAML."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn, TypeVar

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_settings import CliSettingsSource, EnvSettingsSource

from cachelink_core import __version__
from cachelink_core.config.base import ENV_DELIMITER, ENV_PREFIX
from cachelink_core.config.complaints import complaints
from cachelink_core.config.daemon import DaemonConfig
from cachelink_core.errors import ConfigError

C = TypeVar("C", bound=DaemonConfig)

_FILE_ENV: Final = f"{ENV_PREFIX}CONFIG"

_SERVICE_LINK: Final = re.compile(r".*_SERVICE_(HOST|PORT(_\w+)?)|.*_PORT(_\d+_(TCP|UDP|SCTP)\w*)?")
"""What Kubernetes adds to every pod for a Service named ``cachelink-…``. Not a setting of ours."""


@dataclass(frozen=True, slots=True)
class Option:
    """One option of a daemon, for documents and tests.

    Attributes:
        name: dotted, as in the file and in messages: ``store.budget``.
        default: as it would be written in the file.
        help: what it means.
    """

    name: str
    default: object
    help: str

    @property
    def flag(self) -> str:
        """The flag of the command line."""
        return "--" + self.name.replace("_", "-")

    @property
    def env(self) -> str:
        """The name in the environment."""
        return ENV_PREFIX + self.name.replace(".", ENV_DELIMITER).upper()


def options(cls: type[DaemonConfig]) -> tuple[Option, ...]:
    """Every option of a daemon, in the order of its sections."""
    defaults = cls().model_dump(mode="json")
    return tuple(_walk(cls, "", defaults))


def _walk(cls: type[BaseModel], prefix: str, defaults: Mapping[str, Any]) -> Iterator[Option]:
    for name, field in cls.model_fields.items():
        section = field.annotation
        if isinstance(section, type) and issubclass(section, BaseModel):
            yield from _walk(section, f"{prefix}{name}.", defaults[name])
        else:
            yield Option(prefix + name, defaults[name], field.description or "")


def load_config(cls: type[C], argv: Sequence[str], environ: Mapping[str, str]) -> C:
    """Resolves a daemon's configuration: flag over environment over file over default.

    ``--help``, ``--version`` and ``--print-config`` print and leave with status 0.

    Args:
        cls: the configuration to fill.
        argv: the arguments without the program's name.
        environ: the environment; names that begin with ``CACHELINK_`` are read.

    Raises:
        ConfigError: an option is unknown or its value impossible; the message names the option, its
            value and where it came from.
    """
    own, flags = _read_flags(cls, argv)
    path = own.config or environ.get(_FILE_ENV)
    layers = {
        f"file {path}": _read_file(Path(path)) if path else {},
        "environment": _read_environment(cls, environ),
        "flag": flags,
    }
    merged: dict[str, Any] = {}
    for layer in layers.values():
        merged = _merge(merged, layer)
    known = [option.name for option in options(cls)]
    try:
        config = cls(**merged)
    except ValidationError as error:
        raise ConfigError("; ".join(complaints(error, layers, known))) from None
    if own.print_config:
        sys.stdout.write(to_yaml(config))
        sys.exit(0)
    return config


def to_yaml(config: DaemonConfig) -> str:
    """The resolved configuration as a file that ``--config`` reads; secrets are starred out."""
    values = config.model_dump(mode="json")
    text: str = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
    return text


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; {self.prog} --help lists the options")


def _read_flags(
    cls: type[DaemonConfig], argv: Sequence[str]
) -> tuple[argparse.Namespace, dict[str, Any]]:
    program = cls.program
    parser = _Parser(
        program,
        usage=f"{program} [--config FILE] [--OPTION VALUE ...]",
        description=cls.__doc__,
        epilog="Flags beat CACHELINK_* in the environment (--store.budget is CACHELINK_STORE__BUDGET), "
        "which beat the file, which beats the defaults.",
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="FILE", help=f"YAML file of options (env {_FILE_ENV})")
    parser.add_argument(
        "--print-config", action="store_true", help="print the resolved options as YAML and exit"
    )
    parser.add_argument("--version", action="version", version=f"{program} {__version__}")
    source: CliSettingsSource[argparse.ArgumentParser] = CliSettingsSource(
        cls, root_parser=parser, cli_parse_args=list(argv)
    )
    own, _ = parser.parse_known_args(list(argv))
    return own, source()


def _read_file(path: Path) -> dict[str, Any]:
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"config file {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {path} is not YAML: {error}") from error
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise ConfigError(f"config file {path} holds {type(found).__name__}, not options by name")
    return found


def _read_environment(cls: type[DaemonConfig], environ: Mapping[str, str]) -> dict[str, Any]:
    ours = {
        name: value
        for name, value in environ.items()
        if name.startswith(ENV_PREFIX) and name != _FILE_ENV and not _is_service_link(name, value)
    }
    for name in ours:
        _check_known(cls, name)
    source = EnvSettingsSource(cls)
    # The source read the process's environment when it was built; only the given one counts.
    source.env_vars = {name.lower(): value for name, value in ours.items()}
    try:
        return source()
    except ValueError as error:
        raise ConfigError(f"environment: {error}: {error.__cause__}") from error


def _is_service_link(name: str, value: str) -> bool:
    if _SERVICE_LINK.fullmatch(name) is None:
        return False
    return "_SERVICE_" in name or "://" in value or re.search(r"_PORT_\d+_", name) is not None


def _check_known(cls: type[BaseModel], name: str) -> None:
    place: object = cls
    for part in name.removeprefix(ENV_PREFIX).lower().split(ENV_DELIMITER):
        if not (isinstance(place, type) and issubclass(place, BaseModel)):
            return  # inside a mapping: its keys are free
        if part not in place.model_fields:
            raise ConfigError(f"environment: {name} is not an option of {cls.__name__}")
        place = place.model_fields[part].annotation


def _merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        held = merged.get(key)
        both = isinstance(held, dict) and isinstance(value, dict)
        merged[key] = _merge(held, value) if both else value  # type: ignore[arg-type]
    return merged
