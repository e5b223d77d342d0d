"""What a run costs: prices, the ledger, budgets. No torch."""

from __future__ import annotations

from surefoot.economics.ledger import Budget, Ledger, Totals, parse_duration
from surefoot.economics.prices import ModelPrice, PriceTable, money

__all__ = ["Budget", "Ledger", "ModelPrice", "PriceTable", "Totals", "money", "parse_duration"]
