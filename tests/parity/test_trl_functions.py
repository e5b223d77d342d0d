"""TRL's functions and static methods: log-probabilities, entropy, length penalty, mask, distillation."""

from __future__ import annotations

import pytest
import torch

from surefoot.core.types import Sampling
from surefoot.credit.filters import soft_overlong
from surefoot.objectives import offpolicy_sequence_mask
from surefoot.objectives.supervised import distillation_advantages, forward_kl
from surefoot.policy.forward import selected_logprobs

from .conftest import Batch, agree


def drawn_logits(seed: int, *shape: int) -> torch.Tensor:
    return 2 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probabilities_entropies_and_their_gradients_agree(temperature: float) -> None:
    from trl.trainer.utils import entropy_from_logits, selective_log_softmax

    logits = drawn_logits(0, 40, 11).requires_grad_()
    targets = torch.arange(40) % 11
    logp, entropy = selected_logprobs(logits, torch.eye(11), targets, Sampling(temperature=temperature))
    peers = selective_log_softmax(logits, targets, temperature)
    theirs = entropy_from_logits(logits / temperature)
    assert agree(logp, peers)
    assert agree(entropy, theirs)
    mine = torch.autograd.grad((logp * targets + entropy).sum(), logits)[0]
    assert agree(mine, torch.autograd.grad((peers * targets + theirs).sum(), logits)[0])


def test_the_soft_overlong_penalty_agrees_at_every_length() -> None:
    from trl.rewards import get_soft_overlong_punishment

    peers = get_soft_overlong_punishment(max_completion_len=50, soft_punish_cache=20)
    lengths = torch.arange(60)
    theirs = peers(completion_ids=[[0] * int(n) for n in lengths])
    ours = soft_overlong(lengths.numpy(), max_length=50, cache=20)
    assert agree(torch.from_numpy(ours), torch.tensor(theirs))


@pytest.mark.parametrize("delta", [0.02, 0.05])
def test_the_off_policy_sequence_mask_agrees(batch: Batch, delta: float) -> None:
    from trl import GRPOTrainer

    theirs = GRPOTrainer.get_off_policy_mask(
        batch.row_advantages[:, :1], batch.logp, batch.logp_old, batch.mask.float(), delta
    )
    ours = offpolicy_sequence_mask(
        batch.logp[batch.mask],
        batch.logp_old[batch.mask],
        batch.row_advantages[batch.mask],
        batch.sequence,
        delta=delta,
    )
    assert agree(ours, theirs.expand(batch.mask.shape)[batch.mask])
    assert 0 < float(ours.mean()) < 1


def test_forward_kl_over_the_whole_vocabulary_is_gkd_with_beta_0() -> None:
    from trl.experimental.gkd import GKDTrainer

    student, teacher = drawn_logits(1, 2, 9, 11).requires_grad_(), drawn_logits(2, 2, 9, 11)
    labels = torch.where(torch.arange(18).reshape(2, 9) % 4 == 3, -100, 1)
    theirs = GKDTrainer.generalized_jsd_loss(student, teacher, labels, beta=0)
    kept = labels != -100
    weights = torch.full((int(kept.sum()),), 1 / int(kept.sum()))
    ours = forward_kl(student.log_softmax(-1)[kept], teacher.log_softmax(-1)[kept], weights).loss
    assert agree(ours, theirs)
    pair = [torch.autograd.grad(loss, student, retain_graph=True)[0] for loss in (ours, theirs)]
    assert agree(*pair)


def test_distillation_advantages_are_minus_the_reverse_kl_of_gkd_in_expectation() -> None:
    from trl.experimental.gkd import GKDTrainer

    student, teacher = drawn_logits(1, 2, 9, 11), drawn_logits(2, 2, 9, 11)
    theirs = GKDTrainer.generalized_jsd_loss(student, teacher, beta=1, reduction="sum")
    own, other = student.log_softmax(-1).flatten(), teacher.log_softmax(-1).flatten()
    assert agree(-(own.exp() * distillation_advantages(own, other)).sum(), theirs)
