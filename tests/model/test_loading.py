"""Folders: what is refused and by which name, EOS ids from everywhere, saving, paths."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig

from headway.errors import ModelError
from headway.model import load_policy, load_tokenizer, resolve_model, save_policy
from headway.model.builtin import sort_tokenizer

Save = Callable[[PreTrainedConfig], Path]


@pytest.fixture
def folder(saved: Save, sizes: dict[str, Any]) -> Path:
    return saved(LlamaConfig(**sizes))


def edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def test_a_missing_tensor_is_refused_by_name(folder: Path) -> None:
    edit(folder, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(ModelError, match=r"missing keys: model\.layers\.1\.mlp\.up_proj\.weight"):
        load_policy(folder, with_grad=False)


def test_an_unexpected_tensor_is_refused_by_name(folder: Path) -> None:
    edit(folder, lambda tensors: tensors.update({"model.layers.1.mlp.fourth.weight": torch.zeros(2, 2)}))
    with pytest.raises(ModelError, match=r"unexpected keys: model\.layers\.1\.mlp\.fourth\.weight"):
        load_policy(folder, with_grad=False)


def test_a_tensor_of_another_shape_is_refused_by_name(folder: Path) -> None:
    edit(folder, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(31)}))
    with pytest.raises(ModelError, match=r"model\.norm\.weight"):
        load_policy(folder, with_grad=False)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite_are_refused_by_name(folder: Path, value: float) -> None:
    edit(folder, lambda tensors: tensors["model.layers.0.self_attn.k_proj.weight"][3].fill_(value))
    with pytest.raises(ModelError, match=r"not finite: model\.layers\.0\.self_attn\.k_proj\.weight"):
        load_policy(folder, with_grad=True)


def test_a_truncated_file_is_refused(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_policy(folder, with_grad=False)


def test_no_weights_an_unknown_architecture_and_no_config_are_refused(folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").rename(tmp_path / "elsewhere")
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_policy(folder, with_grad=False)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "abacus"}))
    with pytest.raises(ModelError, match="abacus"):
        load_policy(folder, with_grad=False)
    with pytest.raises(ModelError, match=r"no config\.json"):
        load_policy(tmp_path, with_grad=False)


def test_resolve_takes_folders_and_builtins_and_refuses_the_rest(folder: Path, tmp_path: Path) -> None:
    assert resolve_model(str(folder)) == folder
    with pytest.raises(ModelError, match=r"no config\.json in it"):
        resolve_model(str(tmp_path))
    with pytest.raises(ModelError, match="no builtin model 'sort9'; there are: sort3, sort5"):
        resolve_model("builtin:sort9")


@pytest.mark.parametrize(
    ("config_eos", "generation_eos", "expected"),
    [
        (2, None, (2,)),
        (2, 5, (2, 5)),
        ([7, 9], [9, 11], (2, 7, 9, 11)),
        (None, [4], (2, 4)),
        (None, None, (2,)),
    ],
)
def test_eos_ids_come_from_tokenizer_config_and_generation_config(
    tiny_model: Path, tmp_path: Path, config_eos: Any, generation_eos: Any, expected: tuple[int, ...]
) -> None:
    config = json.loads((tiny_model / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "eos_token_id": config_eos}))
    if generation_eos is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": generation_eos}))
    sort_tokenizer().save_pretrained(str(tmp_path))
    assert load_tokenizer(tmp_path).eos_ids == expected


def test_a_prompt_is_encoded_without_additions_and_messages_need_a_template(tiny_model: Path) -> None:
    tokenizer = load_tokenizer(tiny_model)
    ids = tokenizer.encode_prompt("^s314=")
    assert tokenizer.decode(ids) == "^s314="
    assert tokenizer.decode_many([ids, ids[:2]]) == ["^s314=", "^s"]
    with pytest.raises(ModelError, match="no chat template"):
        tokenizer.encode_prompt([{"role": "user", "content": "sort"}])
    tokenizer.inner.chat_template = "{% for m in messages %}s{{ m['content'] }}{% endfor %}="
    assert tokenizer.encode_prompt([{"role": "user", "content": "31"}]) == tokenizer.encode_prompt("s31=")


def test_a_folder_without_a_tokenizer_is_refused(folder: Path) -> None:
    with pytest.raises(ModelError, match="tokenizer cannot be loaded"):
        load_tokenizer(folder)


def test_a_saved_policy_loads_in_transformers_with_the_trained_weights(
    tiny_model: Path, tmp_path: Path
) -> None:
    policy = load_policy(tiny_model, with_grad=True)
    with torch.no_grad():
        policy.flat.mul_(1.25)
    save_policy(policy, tiny_model, tmp_path / "out")
    module = AutoModelForCausalLM.from_pretrained(str(tmp_path / "out"))
    for name, parameter in policy.module.named_parameters():
        assert torch.equal(module.get_parameter(name), parameter), name
    assert load_tokenizer(tmp_path / "out").encode_prompt("12") == load_tokenizer(tiny_model).encode_prompt(
        "12"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
