"""Configuration: one field is one option, in the file, in the environment and as a flag.

A daemon's configuration is a frozen tree of value objects, each owned by the part that it configures.
Name, default and description of an option are written once, at its field; the flag
(``--store.budget``), the environment name (``CACHELINK_STORE__BUDGET``) and the key in the YAML file
follow from it. A flag beats the environment, which beats the file, which beats the default.
"""

from cachelink_core.config.base import Section
from cachelink_core.config.daemon import DaemonConfig
from cachelink_core.config.loading import Option, load_config, options, to_yaml
from cachelink_core.config.sections import (
    Auth,
    HttpListen,
    Listen,
    Log,
    Model,
    ModelDType,
    Slots,
    Store,
    Tls,
    Token,
)
from cachelink_core.config.values import Address, Duration, Name, Port, Rate, Size, written

__all__ = [
    "Address",
    "Auth",
    "DaemonConfig",
    "Duration",
    "HttpListen",
    "Listen",
    "Log",
    "Model",
    "ModelDType",
    "Name",
    "Option",
    "Port",
    "Rate",
    "Section",
    "Size",
    "Slots",
    "Store",
    "Tls",
    "Token",
    "load_config",
    "options",
    "to_yaml",
    "written",
]
