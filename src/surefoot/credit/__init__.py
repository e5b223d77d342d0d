"""Credit turns scores into advantages: pure functions on tensors that know no run, model or config."""

from surefoot.credit.trajectory import (
    GroupStats,
    gdpo,
    group_relative,
    group_statistics,
    leave_one_out,
    opo,
    pass_at_k,
    reinforce,
    reinforce_pp,
    reinforce_pp_baseline,
    remax,
    to_tokens,
)

__all__ = [
    "GroupStats",
    "gdpo",
    "group_relative",
    "group_statistics",
    "leave_one_out",
    "opo",
    "pass_at_k",
    "reinforce",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "remax",
    "to_tokens",
]
