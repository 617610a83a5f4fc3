"""Pretrained models: found in a folder, in the cache or on the hub, and loaded without executing code."""

from __future__ import annotations

import json
import pickle
import shutil
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from tests import forked
from tests.models.hub_server import COMMIT, serving
from trainwright.errors import UsageError
from trainwright.models.hf import hf_model
from trainwright.models.pretrained import (
    Pretrained,
    find_folder,
    hub_model_of,
    pretrained_of,
    require_weights,
    revision_of,
)
from trainwright.plan.trace.fake_tensors import fake_tensors

pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers")]
SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
IDS = torch.randint(0, 11, (2, 6), generator=torch.Generator().manual_seed(0))


def llama() -> Any:
    torch.manual_seed(0)
    return hf_model(architecture="LlamaForCausalLM", vocab_size=11, max_position_embeddings=8, **SIZES)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with sharded weights."""
    folder = tmp_path_factory.mktemp("saved") / "llama"
    model = llama()
    model.config.use_cache = True
    model.save_pretrained(folder, max_shard_size="5KB")
    return folder


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the hub's cache. Nothing may be fetched."""
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "cache"


def in_cache(cache: Path, folder: Path, *, only: str = "*") -> Path:
    """Put the files of a folder into the cache as ``user/tiny``, as a download does; return the snapshot."""
    repository = cache / "models--user--tiny"
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    for path in folder.glob(only):
        shutil.copyfile(path, snapshot / path.name)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    return snapshot


def origin_of(model: Any) -> Pretrained:
    found = pretrained_of(model)
    assert found is not None
    return found


def test_sharded_weights_are_loaded_and_the_class_is_that_of_the_config(
    saved: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert len(list(saved.glob("*.safetensors"))) > 2
    model: Any = hf_model(name=str(saved))
    assert type(model).__name__ == "LlamaForCausalLM" and model.config.use_cache is False
    expected = llama().state_dict()
    assert all(torch.equal(each, expected[name]) for name, each in model.state_dict().items())
    origin = origin_of(model)
    assert (origin.new, origin.unused, origin.use_cache, origin.dtype) == ((), (), True, "float32")
    assert origin.revision.startswith("sha256:")
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(("dtype", "expected"), [("bf16", torch.bfloat16), ("fp32", torch.float32)])
def test_dtype(saved: Path, dtype: str, expected: torch.dtype) -> None:
    assert {each.dtype for each in hf_model(name=str(saved), dtype=dtype).parameters()} == {expected}


def test_auto_is_the_dtype_of_the_files(tmp_path: Path) -> None:
    llama().to(torch.bfloat16).save_pretrained(tmp_path / "half")
    assert next(hf_model(name=str(tmp_path / "half"), dtype="auto").parameters()).dtype == torch.bfloat16
    assert next(hf_model(name=str(tmp_path / "half")).parameters()).dtype == torch.float32


def test_a_new_head_is_named_and_does_not_belong_to_the_base(saved: Path) -> None:
    model: Any = hf_model(name=str(saved), architecture="LlamaForSequenceClassification", num_labels=5)
    origin = origin_of(model)
    assert model.score.weight.shape == (5, 16)
    assert (origin.new, origin.new_in_base, origin.unused) == (("score.weight",), (), ("lm_head.weight",))


@pytest.mark.parametrize("lost", ["model.layers.1.mlp.up_proj.weight", "lm_head.weight"])
def test_a_lost_layer_of_the_base_is_named(tmp_path: Path, lost: str) -> None:
    from safetensors.torch import load_file, save_file

    llama().save_pretrained(tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    save_file({name: each for name, each in load_file(file).items() if name != lost}, file, {"format": "pt"})
    assert origin_of(hf_model(name=str(tmp_path / "model"))).new_in_base == (lost,)


def test_tied_weights_are_not_lost(tmp_path: Path) -> None:
    model: Any = hf_model(architecture="GPT2LMHeadModel", n_layer=1, n_head=2, n_embd=8, n_positions=8, vocab_size=11)
    model.save_pretrained(tmp_path / "gpt2")
    loaded: Any = hf_model(name=str(tmp_path / "gpt2"))
    assert origin_of(loaded).new == () and loaded.lm_head.weight is loaded.transformer.wte.weight


def test_under_fake_tensors_no_weights_are_read(saved: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(saved, folder)
    for file in folder.glob("*.safetensors"):
        file.write_bytes(b"")  # they exist, and cannot be read
    with fake_tensors():
        model = hf_model(name=str(folder), dtype="bf16")
    assert {each.dtype for each in model.parameters()} == {torch.bfloat16}
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in llama().named_parameters()]


def test_the_hash_of_a_folder_covers_weights_and_configuration(saved: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(saved, folder)
    before = revision_of(folder)
    (folder / "README.md").write_text("a card")
    assert revision_of(folder) == before == revision_of(saved)
    for file in ("config.json", min(path.name for path in folder.glob("*.safetensors"))):
        content = (folder / file).read_bytes()
        (folder / file).write_bytes(content + b" ")
        assert revision_of(folder) != before
        (folder / file).write_bytes(content)


def test_the_cache_is_used_and_gives_the_commit(saved: Path, cache: Path) -> None:
    snapshot = in_cache(cache, saved)
    assert find_folder("user/tiny") == snapshot and find_folder("user/tiny", "main") == snapshot
    assert find_folder("user/tiny", COMMIT) == snapshot
    assert replace(origin_of(hf_model(name="user/tiny"))).revision == COMMIT


@pytest.mark.parametrize(
    ("name", "revision", "message", "remedy"),
    [
        ("user/tiny", None, "nor in the cache of the hub", "hf download user/tiny; or give the path"),
        ("user/tiny", "v2", "at revision v2", "hf download user/tiny --revision v2"),
        ("./tiny", None, "there is no folder ./tiny", "give the path of a folder with config.json"),
        ("a/b/c", None, "there is no folder a/b/c", "relative ones start at"),
    ],
)
def test_a_name_that_is_nowhere(name: str, revision: str | None, message: str, remedy: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        hf_model(name=name, revision=revision)
    assert remedy in caught.value.remedy


def test_an_incomplete_download_is_named(saved: Path, cache: Path) -> None:
    in_cache(cache, saved, only="*.json")
    with pytest.raises(UsageError, match=r"no complete pretrained model: no model-00001-of-.*safetensors") as caught:
        hf_model(name="user/tiny")
    assert caught.value.remedy == f"hf download user/tiny --revision {COMMIT}"


def test_keys_that_do_not_apply_are_refused(saved: Path) -> None:
    for wrong, message in (
        ({"name": str(saved), "revision": "main"}, "is a folder, which has no revision"),
        ({"name": str(saved), "hiden_size": 4}, "has no key 'hiden_size'"),
        ({"name": str(saved), "dtype": "fp8"}, "dtype must be one of"),
        ({"name": str(saved), "architecture": "LlamaForCausalML"}, "no architecture 'LlamaForCausalML'"),
        ({"architecture": "LlamaForCausalLM", "dtype": "bf16"}, "are for pretrained weights"),
    ):
        with pytest.raises(UsageError, match=message):
            hf_model(**wrong)  # type: ignore[arg-type]


class Malicious:
    """Unpickling it writes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.write_text, (self.path, "executed")


@pytest.mark.parametrize("base", ["llama", None])
def test_an_adapter_is_no_model(base: str | None, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base}))
    with pytest.raises(UsageError, match="holds an adapter") as raised:
        require_weights(tmp_path)
    remedy = raised.value.remedy or ""
    assert "is_trainable=True" in remedy and ("llama" in remedy) == (base is not None) and "None" not in remedy


def test_pickled_weights_are_refused_unread(saved: Path, tmp_path: Path) -> None:
    folder, witness = tmp_path / "pickled", tmp_path / "witness"
    folder.mkdir()
    shutil.copyfile(saved / "config.json", folder / "config.json")
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Malicious(witness)))
    with pytest.raises(UsageError, match="loading a pickle can execute code") as caught:
        hf_model(name=str(folder))
    assert "save_pretrained" in caught.value.remedy and not witness.exists()


CODE = """\
from pathlib import Path
from types import ModuleType
from transformers import LlamaConfig, LlamaForCausalLM

Path({witness!r}).write_text("executed")

class TinyConfig(LlamaConfig):
    model_type = "tiny_with_code"

class TinyForCausalLM(LlamaForCausalLM):
    config_class = TinyConfig
"""


def test_code_of_a_repository_runs_only_if_the_recipe_allows_it(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers.dynamic_module_utils

    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder, witness = tmp_path / "coded", tmp_path / "witness"
    shutil.copytree(saved, folder)
    config = json.loads((folder / "config.json").read_text())
    mapped = {"AutoConfig": "tiny.TinyConfig", "AutoModelForCausalLM": "tiny.TinyForCausalLM"}
    config |= {"model_type": "tiny_with_code", "architectures": ["TinyForCausalLM"], "auto_map": mapped}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tiny.py").write_text(CODE.format(witness=str(witness)))
    with pytest.raises(UsageError, match=r"needs code from its repository \(tiny.py\)") as caught:
        hf_model(name=str(folder))
    assert "trust_remote_code: true" in caught.value.remedy and not witness.exists()
    model = hf_model(name=str(folder), trust_remote_code=True)
    assert witness.exists() and type(model).__name__ == "TinyForCausalLM"
    assert origin_of(model).new == ()


HUB = """\
import json, os, sys
from pathlib import Path
from types import ModuleType
from trainwright.commands.export import push
from trainwright.models.pretrained import find_folder, revision_of

folder = Path(sys.argv[1])
print(push(folder, "user/tiny"))
found = find_folder("user/tiny")
same = all((found / path.name).read_bytes() == path.read_bytes() for path in folder.glob("*.safetensors"))
names = sorted(path.name for path in found.iterdir())
print(json.dumps({"revision": revision_of(found), "same": same, "names": names}))
os.environ["HF_TOKEN"] = "hf_other"
push(folder, "user/tiny")
"""


@pytest.mark.process
def test_upload_and_download_by_the_api_of_the_hub(saved: Path, tmp_path: Path) -> None:
    folder = tmp_path / "to push"
    shutil.copytree(saved, folder)
    (folder / "extra.py").write_text("print()")  # not downloaded without trust_remote_code
    with serving() as hub:
        environment = {
            "HF_ENDPOINT": hub.address,
            "HF_TOKEN": "hf_test",
            "HF_HOME": str(tmp_path / "home"),
            "HF_HUB_OFFLINE": "0",
        }
        done = forked.run(HUB, str(folder), env=environment)
        assert done.returncode == 1, done.stderr
        address, found = done.stdout.splitlines()[-2:]
        assert address == f"{hub.address}/user/tiny" and hub.is_private is True
        assert hub.content["config.json"] == (saved / "config.json").read_bytes()
        answer = json.loads(found)
        assert answer["revision"] == COMMIT and answer["same"] is True
        assert answer["names"] == sorted(path.name for path in saved.iterdir())
    assert "cannot be uploaded to user/tiny" in done.stderr and "hf auth login" in done.stderr


def test_an_ordinary_model_does_not_load_the_modules_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchmetrics imports the package, whose attributes import their modules when they are read."""

    class Lazy(ModuleType):
        def __getattr__(self, name: str) -> object:
            raise AssertionError(f"{name} was read")

    monkeypatch.setitem(sys.modules, "transformers", Lazy("transformers"))
    monkeypatch.delitem(sys.modules, "transformers.modeling_utils", raising=False)
    assert hub_model_of(nn.Linear(2, 2)) is None
