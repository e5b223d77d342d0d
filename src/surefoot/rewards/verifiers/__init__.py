"""Ready rewards whose verdict comes from a program out of the policy's reach, and judges.

What each needs beyond the core: math_answer math-verify, json_answer jsonschema, the judges httpx, and
the rewards that run programs a working sandbox. Nothing of that is loaded before it is used.
"""

from surefoot.rewards.verifiers.answers import (
    exact_match,
    math_answer,
    normalise,
    numeric,
    parse_number,
    token_f1,
)
from surefoot.rewards.verifiers.code import Call, Run, code_function, code_program
from surefoot.rewards.verifiers.execution import Executor, Opener
from surefoot.rewards.verifiers.judge import Endpoint, pairwise_judge, rubric_judge
from surefoot.rewards.verifiers.pytests import Repository, read_tree, repository_tests
from surefoot.rewards.verifiers.sql import sql_result
from surefoot.rewards.verifiers.state import state_reward
from surefoot.rewards.verifiers.structured import json_answer, multiple_choice
from surefoot.rewards.verifiers.submission import Form, forged_marks, submitted

__all__ = [
    "Call",
    "Endpoint",
    "Executor",
    "Form",
    "Opener",
    "Repository",
    "Run",
    "code_function",
    "code_program",
    "exact_match",
    "forged_marks",
    "json_answer",
    "math_answer",
    "multiple_choice",
    "normalise",
    "numeric",
    "pairwise_judge",
    "parse_number",
    "read_tree",
    "repository_tests",
    "rubric_judge",
    "sql_result",
    "state_reward",
    "submitted",
    "token_f1",
]
