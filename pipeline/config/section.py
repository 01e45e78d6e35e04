"""The base of all sections of a configuration."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator


class Section(BaseModel):
    """Base of all sections: immutable, no unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _keep_own_defaults(cls, data: Any) -> Any:
        """A section given in part keeps the rest of this place's default, not of its class's.

        `distill: {steps: 5}` must not turn distillation into cross-entropy.
        """
        if not isinstance(data, dict):
            return data
        places = {k: f.default for k, f in cls.model_fields.items() if isinstance(f.default, Section)}
        return {k: _merged(places[k].model_dump(), v) if k in places else v for k, v in data.items()}


def _merged(default: dict[str, Any], given: Any) -> Any:
    """`given` over `default`, section by section."""
    if not isinstance(given, dict):
        return given
    nested = {k: _merged(default[k], v) if isinstance(default.get(k), dict) else v for k, v in given.items()}
    return default | nested
