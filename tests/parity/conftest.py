"""The same inputs through Surefoot's functions and through the public functions of verl and TRL.

A test either holds both sides to ``TOLERANCE`` or shows which convention differs, and says why ours is as it
is. Modules named after a peer are skipped where it is not installed; ``make parity`` installs both.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

TOLERANCE = 1e-5
PEERS = ("trl", "verl")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for peer in PEERS:
            if item.path.name.startswith(f"test_{peer}_") and importlib.util.find_spec(peer) is None:
                item.add_marker(pytest.mark.skip(reason=f"{peer} is not installed; `make parity` runs this"))


def agree(ours: Tensor, theirs: Tensor) -> bool:
    """Same shape, and equal to ``TOLERANCE``: absolute up to 1, relative above, where peers round float32."""
    assert ours.shape == theirs.shape
    assert ours.numel() > 0
    return torch.allclose(ours.double(), theirs.detach().double(), atol=TOLERANCE, rtol=TOLERANCE)


@dataclass(frozen=True)
class Batch:
    """Rows ``[B, T]`` as peers lay them out, with observations inside and padding at the end.

    ``mask`` bool is True on sampled tokens; ``x[mask]`` is the flat layout ``[N]`` of Surefoot. All else is
    float32; outside the mask it holds finite rubbish that must not count. ``logp`` requires a gradient.
    """

    mask: Tensor
    group: Tensor
    returns: Tensor
    logp: Tensor
    logp_old: Tensor
    logp_ref: Tensor
    advantages: Tensor
    values: Tensor

    @property
    def lengths(self) -> Tensor:
        return self.mask.sum(1)

    @property
    def sequence(self) -> Tensor:
        return torch.arange(len(self.mask)).repeat_interleave(self.lengths)

    @property
    def row_advantages(self) -> Tensor:
        """One advantage per row, on all its positions."""
        return self.advantages[:, :1].expand_as(self.advantages).contiguous()

    def at_last(self, x: Tensor) -> Tensor:
        """``x`` [B] on the last sampled token of each row, 0 elsewhere: [B, T]."""
        place = self.mask.long().cumsum(1).argmax(1)
        return torch.zeros(self.mask.shape).scatter_(1, place[:, None], x[:, None].float())

    def gradient(self, loss: Tensor) -> Tensor:
        """d loss / d logp, [B, T]."""
        return torch.autograd.grad(loss, self.logp, retain_graph=True)[0]


def make_batch(seed: int, rows: int = 12, columns: int = 17) -> Batch:
    """Three groups with differing returns, rows of 1 to 17 tokens, ratios on both sides of any clip."""
    draw = torch.Generator().manual_seed(seed)
    mask = torch.rand(rows, columns, generator=draw) < 0.7
    mask &= torch.arange(columns) < torch.randint(4, columns + 1, (rows, 1), generator=draw)
    mask[:, 0] = True
    mask[0] = torch.arange(columns) < 1
    logp = -torch.rand(rows, columns, generator=draw) * 3 - 0.05

    def near(scale: float) -> Tensor:
        return (logp + scale * torch.randn(rows, columns, generator=draw)).clamp(max=-0.01)

    return Batch(
        mask=mask,
        group=torch.arange(rows) % 3,
        returns=torch.randn(rows, generator=draw),
        logp_old=near(0.4),
        logp_ref=near(0.7),
        logp=logp.requires_grad_(),
        advantages=torch.randn(rows, columns, generator=draw),
        values=torch.randn(rows, columns, generator=draw),
    )


@pytest.fixture(params=range(3), ids=lambda seed: f"seed{seed}")
def batch(request: pytest.FixtureRequest) -> Batch:
    return make_batch(request.param)


def tiny_model(seed: int, kind: str = "LlamaForCausalLM") -> Any:
    """A model of one layer and 32 tokens in float32, drawn wide enough that its probabilities differ."""
    import transformers

    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.4,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
        num_labels=1,
    )
    return getattr(transformers, kind)(config)


def token_logps(model: Any, tokens: Tensor, attention: Tensor) -> Tensor:
    """log p of every token after those before it, [B, L], by the plain forward pass; 0 for the first."""
    logits = model(input_ids=tokens, attention_mask=attention).logits[:, :-1]
    chosen = logits.log_softmax(-1).gather(2, tokens[:, 1:, None])[:, :, 0]
    return torch.nn.functional.pad(chosen, (1, 0))


def model_gradient(model: Any, loss: Tensor) -> Tensor:
    """d loss / d parameters, in one vector."""
    parts = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    return torch.cat([part.flatten() for part in parts])


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """Words w0, w1, ... are the tokens 3, 4, ... of ``tiny_model``."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<eos>": 1, "<unk>": 2} | {f"w{i}": 3 + i for i in range(29)}
    inner = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


@pytest.fixture(scope="session")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Settings of every TRL trainer here: float32 on the CPU, and nothing is written or reported."""
    return {
        "output_dir": str(tmp_path_factory.mktemp("trl")),
        "bf16": False,
        "use_cpu": True,
        "gradient_checkpointing": False,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
    }
