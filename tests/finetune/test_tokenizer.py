"""A tokenizer is found as the model of its name is: in a folder, in the cache of the hub, or on the hub."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import forked
from tests.finetune.tokenizers import make_tokenizer
from tests.models.hub_server import COMMIT, serving
from trainwright.errors import UsageError
from trainwright.finetune.tokenizer import load_tokenizer

pytestmark = pytest.mark.slow

TOKENIZER = """\
from trainwright.finetune.tokenizer import load_tokenizer

print(load_tokenizer("user/tiny").name_or_path)
"""
MODEL = """\
from trainwright.models.pretrained import find_folder

print(find_folder("user/tiny"))
"""


@pytest.mark.process
def test_a_tokenizer_is_downloaded_once_and_without_the_weights(tmp_path: Path) -> None:
    make_tokenizer().save_pretrained(tmp_path / "saved")
    with serving() as hub:
        hub.content.update({path.name: path.read_bytes() for path in (tmp_path / "saved").iterdir()})
        hub.content |= {"config.json": b"{}", "model.safetensors": b"weights", "README.md": b"", "code.py": b""}
        env = {"HF_ENDPOINT": hub.address, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
        first = forked.run(TOKENIZER, env=env)
        assert first.returncode == 0, first.stderr
        assert not any("safetensors" in each for each in hub.requests)
        model = forked.run(MODEL, env=env)
        assert any("safetensors" in each for each in hub.requests)
        hub.requests.clear()
        again = forked.run(MODEL + TOKENIZER, env=env)
        assert hub.requests == []
    assert again.stdout == model.stdout + first.stdout and first.stdout.strip().endswith(f"snapshots/{COMMIT}")
    assert model.stdout == first.stdout


@pytest.mark.parametrize(
    ("name", "revision", "message", "remedy"),
    [
        ("user/none", None, "user/none is no folder in .*, nor in the cache of the hub", "hf download user/none"),
        ("user/none", "v2", "user/none at revision v2", "--revision v2"),
        ("./none", None, "there is no folder ./none", "relative ones start at"),
        ("empty", None, "has no tokenizer: none of tokenizer.json", "save_pretrained"),
        ("empty", "v2", "is a folder, which has no revision", "leave revision out"),
        ("broken", None, "'broken' cannot be loaded", "save it again"),
    ],
)
def test_a_tokenizer_that_cannot_be_loaded(
    name: str, revision: str | None, message: str, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    Path("broken").mkdir()
    Path("broken/tokenizer.json").write_text("{")
    with pytest.raises(UsageError, match=message) as caught:
        load_tokenizer(name, revision=revision)
    assert remedy in str(caught.value.remedy)
