"""A tiny, randomly initialised byte-level llama for tests and two-minute smoke runs.

It needs no file and no network, and must not disturb the caller's random state.
"""

from __future__ import annotations

from surefoot.core.errors import ConfigError
from surefoot.core.seeds import derive
from surefoot.policy.gguf import byte_level_tokenizer
from surefoot.policy.models import LoadedModel

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # ids 0, 1, 2
CONTEXT = 2048

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def build_scratch(
    seed: int = 0, *, hidden: int = 128, layers: int = 3, heads: int = 4, kv_heads: int = 2
) -> LoadedModel:
    """A float32 ``LlamaForCausalLM`` over 259 tokens: 3 special ones, then byte ``b`` as id ``3 + b``.

    The same arguments give the same weights, bit for bit. By default 0.48 million parameters (embeddings
    tied), 2048 tokens of context.
    Raises ``ConfigError`` for sizes that do not divide.
    """
    _check_sizes(hidden=hidden, layers=layers, heads=heads, kv_heads=kv_heads)
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    config = LlamaConfig(
        vocab_size=len(SPECIAL_TOKENS) + 256,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        # transformers zeroes the padding token's row and keeps gradients from it, yet here it ends answers
        pad_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive("scratch", seed))
        model = LlamaForCausalLM(config).float().eval()
    model.config.pad_token_id = 2
    start, end = SPECIAL_TOKENS[1:]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=byte_level_tokenizer(_vocabulary(), [], SPECIAL_TOKENS, split_digits=False),
        bos_token=start,
        eos_token=end,
        pad_token=end,
        unk_token=SPECIAL_TOKENS[0],
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
        chat_template=CHATML,
    )
    return LoadedModel(model=model, tokenizer=tokenizer, name="scratch", path=None, context=CONTEXT)


def _check_sizes(**sizes: int) -> None:
    for name, value in sizes.items():
        if value < 1:
            raise ConfigError(f"{name} = {value}: has to be at least 1")
    hidden, heads, kv_heads = sizes["hidden"], sizes["heads"], sizes["kv_heads"]
    if hidden % (2 * heads):
        raise ConfigError(
            f"hidden = {hidden}: has to be a multiple of 2 * heads = {2 * heads} (rotary pairs)"
        )
    if heads % kv_heads:
        raise ConfigError(f"kv_heads = {kv_heads}: has to divide heads = {heads}")


def _vocabulary() -> dict[str, int]:
    """The special tokens, then the 256 bytes in order, as printable characters of GPT-2's alphabet."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    characters = [chr(byte if byte in printable else next(others)) for byte in range(256)]
    return {token: index for index, token in enumerate([*SPECIAL_TOKENS, *characters])}
