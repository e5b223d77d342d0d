"""Prices in US dollars: of seconds on a machine, or of tokens at a provider.

This module must not know what was done, only how long it took and how many tokens it moved.
"""

from __future__ import annotations

import math
import tomllib
from datetime import date
from pathlib import Path
from typing import Annotated, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from surefoot.core.errors import ConfigError, nearest

Kind = Literal["electricity", "rented", "api"]
Price = Annotated[float, Field(ge=0, allow_inf_nan=False)]

DEFAULT_WATTS: Final = 65.0
DEFAULT_USD_PER_KWH: Final = 0.30
_JOULES_PER_KWH: Final = 3.6e6
_SECONDS_PER_HOUR: Final = 3600.0
_PER_MILLION: Final = 1e6


def money(usd: float) -> str:
    """US dollars; below a dollar with two significant digits, down to a hundredth of a cent."""
    if 0 < usd < 1e-4:
        return "< $0.0001"
    if usd == 0 or usd >= 1:
        return f"${usd:,.2f}"
    return f"${usd:.{max(2, 1 - math.floor(math.log10(usd)))}f}"


class ModelPrice(BaseModel):
    """What one model's tokens cost at a provider, in USD per million tokens, as of ``date``.

    ``cached`` is for context read again from the provider's cache.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    prompt: Price
    cached: Price
    sampled: Price
    date: date


class PriceTable(BaseModel):
    """How work is priced. ``electricity``: watts of the whole machine times its seconds; ``rented``:
    USD an hour; ``api``: tokens, by model.

    The default, 65 W at 0.30 USD/kWh, is an assumption about a laptop, and :meth:`basis` says so.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Kind = "electricity"
    watts: Price = DEFAULT_WATTS
    usd_per_kwh: Price = DEFAULT_USD_PER_KWH
    usd_per_hour: Price | None = None
    models: dict[str, ModelPrice] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _fields_fit_the_kind(self) -> Self:
        belongs: dict[Kind, set[str]] = {
            "electricity": {"watts", "usd_per_kwh"},
            "rented": {"usd_per_hour"},
            "api": {"models"},
        }
        foreign = self.model_fields_set - belongs[self.kind] - {"kind"}
        if foreign:
            raise ValueError(
                f"{', '.join(sorted(foreign))} has no effect with kind {self.kind!r}, "
                f"which takes {', '.join(sorted(belongs[self.kind]))}"
            )
        if self.kind == "rented" and self.usd_per_hour is None:
            raise ValueError("usd_per_hour is missing; kind 'rented' needs it")
        if self.kind == "api" and not self.models:
            raise ValueError("models is empty; kind 'api' needs the prices of at least one model")
        return self

    @classmethod
    def load(cls, path: Path) -> PriceTable:
        """Read a TOML file with these fields. Raises ConfigError that names the field."""
        try:
            return cls.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
        except OSError as error:
            raise ConfigError(f"price table {path} cannot be read: {error.strerror or error}") from error
        except ValidationError as error:
            raise ConfigError(f"price table {path}: {_first(error)}") from error
        except ValueError as error:  # not UTF-8, or not TOML
            raise ConfigError(f"price table {path} is not TOML: {error}") from error

    def cost_of_seconds(self, seconds: float) -> float:
        """USD of running the machine for ``seconds`` of wall clock; 0 at a provider of tokens."""
        if self.kind == "electricity":
            return seconds * self.watts / _JOULES_PER_KWH * self.usd_per_kwh
        return seconds * (self.usd_per_hour or 0.0) / _SECONDS_PER_HOUR

    def cost_of_tokens(
        self, prompt: int = 0, cached: int = 0, sampled: int = 0, *, model: str | None = None
    ) -> float:
        """USD of tokens, the three counts disjoint; 0 on a machine of one's own.

        ``model`` may be left out when the table has one. Raises ConfigError for an unknown model.
        """
        if self.kind != "api":
            return 0.0
        price = self._model(model)
        return (prompt * price.prompt + cached * price.cached + sampled * price.sampled) / _PER_MILLION

    def cost(
        self,
        seconds: float = 0.0,
        prompt: int = 0,
        cached: int = 0,
        sampled: int = 0,
        *,
        model: str | None = None,
    ) -> float:
        """USD of seconds and tokens together."""
        return self.cost_of_seconds(seconds) + self.cost_of_tokens(prompt, cached, sampled, model=model)

    def basis(self) -> str:
        """One phrase that says what the money rests on."""
        if self.kind == "rented":
            return f"machine time at {self.usd_per_hour:g} USD/h"
        if self.kind == "api":
            oldest = min(price.date for price in self.models.values())
            return f"provider prices of {', '.join(sorted(self.models))} as of {oldest.isoformat()}"
        assumed = {"watts", "usd_per_kwh"} - self.model_fields_set
        note = f" (assumed: {', '.join(sorted(assumed))})" if assumed else ""
        return f"electricity, {self.watts:g} W at {self.usd_per_kwh:g} USD/kWh{note}"

    def _model(self, name: str | None) -> ModelPrice:
        if name is None and len(self.models) == 1:
            return next(iter(self.models.values()))
        if name is None or name not in self.models:
            raise ConfigError(f"no price for model {name!r}; {nearest(name or '', self.models)}")
        return self.models[name]


def _first(error: ValidationError) -> str:
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"])
    return f"{place}: {first['msg']}" if place else first["msg"]
