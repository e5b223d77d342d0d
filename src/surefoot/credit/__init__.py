"""Credit: turns scores into advantages. Pure functions on tensors; knows nothing of runs, models or configs."""

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
