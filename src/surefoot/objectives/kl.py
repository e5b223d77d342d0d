"""Per-token KL estimators between the policy and a reference, for tokens sampled from the policy.

Pure functions on flat tensors; they do not know where the penalty is applied (reward or loss).
"""

from __future__ import annotations

from typing import Literal, get_args

from torch import Tensor

from surefoot.core.checks import require_option
from surefoot.objectives.policy_gradient import LOG_RATIO_LIMIT, token_tensor

KlKind = Literal["k1", "k2", "k3", "k3_k2grad"]


def kl_estimate(logp: Tensor, logp_ref: Tensor, kind: KlKind = "k3") -> Tensor:
    """KL(policy || reference) per sampled token, float64 ``[N]``, with gradient through ``logp`` only.

    With x = logp - logp_ref (http://joschu.net/blog/kl-approx.html):

    * ``k1`` x: unbiased value; as a loss its expected gradient is zero, so use it inside a reward only.
    * ``k2`` x^2/2: on-policy, its gradient is that of the reverse KL.
    * ``k3`` exp(-x) + x - 1: never negative, low variance; its gradient is that of the *forward* KL.
    * ``k3_k2grad``: the value of k3 with the gradient of k2.

    k3 limits x to +-20, beyond which its value is constant and its gradient zero. Raises ``DataError`` for a
    wrong shape, dtype or a non-finite value and ``ConfigError`` for an unknown kind.
    """
    require_option("kind", kind, get_args(KlKind))
    x = token_tensor("logp", logp) - token_tensor("logp_ref", logp_ref, like=logp).detach()
    if kind == "k1":
        return x
    k2 = 0.5 * x.square()
    if kind == "k2":
        return k2
    bounded = x.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    k3 = (-bounded).exp() + bounded - 1
    return k3 if kind == "k3" else k2 + (k3 - k2).detach()
