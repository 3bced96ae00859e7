"""The base of every section, and the names of the environment."""

from __future__ import annotations

from typing import Final

from pydantic import BaseModel, ConfigDict

ENV_PREFIX: Final = "CACHELINK_"
ENV_DELIMITER: Final = "__"


class Section(BaseModel):
    """A value object of options that belong together. A field's docstring is its description."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True
    )
