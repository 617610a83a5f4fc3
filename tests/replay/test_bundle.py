"""A watched step from a bundle: the same bits in another process; whatever was forged is refused."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F

import trainwright as tw
from tests import forked
from tests.replay.nets import KINDS, build
from trainwright.checkpoint.codec import same_bits
from trainwright.checkpoint.manifest import NAME as MANIFEST
from trainwright.checkpoint.manifest import write_manifest
from trainwright.commands.replay import rerun
from trainwright.doctor.pages import page as explain
from trainwright.errors import UsageError
from trainwright.recorder.program import Operation
from trainwright.replay import serialization
from trainwright.replay.bundle import BundleError, keep, kind_of, prune, read_bundle

ROOT = Path(__file__).parent.parent.parent
STEPS = 12
MADE = "from tests.replay.nets import build\n\ndef made():\n    return build('norm-fp32')\n"


def train(kind: str, folder: Path, wanted: Iterator[int] | list[int]) -> dict[int, tuple[Path, dict[str, Any]]]:
    """A loop as one would write it, with accumulation; bundles of the wanted steps, and the weights after them."""
    torch.manual_seed(3)
    model, optimizer = build(kind)
    dtype = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[kind.split("-")[1]]
    scaler = torch.amp.GradScaler("cpu", enabled=dtype is torch.float16, init_scale=1024.0)
    data, labels = torch.randn(97, 12), torch.randint(0, 3, (97,))
    x_all = data if not kind.startswith("sliced") else torch.randn(97, 14)[:, 1:13]
    kept: dict[int, tuple[Path, dict[str, Any]]] = {}
    with tw.watch(model, optimizer, scaler=scaler, out=None, quiet=True, accumulation=2, examine="listen") as watching:
        session = watching.session
        for step in range(1, STEPS + 1):
            for micro in range(2):
                at = 1 + (step * 2 + micro) * 3
                x, y = x_all[at : at + 8], labels[at : at + 8]
                with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
                    loss = F.cross_entropy(model(x), y, label_smoothing=0.1) / 2
                scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5 if step % 2 else 50.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            if step in wanted:
                player, ring = session.runner.replayer, session.ring
                path = keep(folder, player, ring, step, {"loss": float(loss.detach()), "bad": float("nan")})
                assert path is not None
                kept[step] = path, {name: p.detach().clone() for name, p in model.named_parameters()}
    return kept


ANOTHER = """\
import json, sys
import torch
from safetensors.torch import save_file
from trainwright.watching.experiments import names_of
from trainwright.recorder.ring import Ring
from trainwright.replay.session import ReplaySession
from trainwright.replay.bundle import read_bundle
from trainwright.replay.replayer import Replayer
from trainwright.commands.replay import rerun, watched
torch.manual_seed(99)
torch.randn(7)
told = []
for model, path, after in zip(sys.argv[1::3], sys.argv[2::3], sys.argv[3::3]):
    done = rerun(path, model=model)
    told.append(done.to_json())
    bundle = read_bundle(path)
    subject = watched._built(model, bundle)
    snapshot, way = bundle.bound(subject, names_of(subject))
    ring = Ring(keep=99, budget_bytes=2**40)
    ring.add_snapshot(snapshot)
    for each in way:
        ring.add(each)
    played = ReplaySession(Replayer(subject, names_of(subject)), ring, bundle.step).run(upto="step")
    save_file(played.after, after)
print(json.dumps(told))
"""


Kept = dict[int, tuple[Path, dict[str, Any]]]


@pytest.fixture(scope="module")
def replayed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Kept, list[Any], Path]]:
    """Of each kind what was trained here, what another process says of it, and where that left its weights."""
    folder, arguments, kept = tmp_path_factory.mktemp("kinds"), list[str](), dict[str, Kept]()
    (folder / "mine.py").write_text(
        "from tests.replay.nets import KINDS, build\n\nfor kind in KINDS:\n"
        "    globals()[kind.replace('-', '_')] = lambda kind=kind: build(kind)\n"
    )
    for kind in KINDS:
        kept[kind] = train(kind, folder / kind, [7, 12])
        for step, (path, _) in kept[kind].items():
            model, after = f"{folder / 'mine.py'}:{kind.replace('-', '_')}", folder / kind / f"{step}.safetensors"
            arguments += [model, str(path), str(after)]
    done = forked.run(ANOTHER, *arguments)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    return {kind: (kept[kind], told[2 * at : 2 * at + 2], folder / kind) for at, kind in enumerate(KINDS)}


@pytest.mark.process
@pytest.mark.parametrize("kind", KINDS)
def test_any_of_the_last_steps_is_the_same_bits_in_another_process(kind: str, replayed: Any) -> None:
    kept, replays, folder = replayed[kind]
    for told in replays:
        assert told["same_bits"] is True, told["outcome"]
        assert {each["what"] for each in told["compared"]} == {"losses", "gradient norm"}
        assert not [each for each in told["findings"] if each["code"].startswith("hw.")]
    for step, (_, weights) in kept.items():
        after = load_file(folder / f"{step}.safetensors")
        assert all(same_bits(after[name], each) for name, each in weights.items()), step


@pytest.mark.slow
def test_an_optimizer_of_torch_is_made_anew(tmp_path: Path) -> None:
    path, _ = train("norm-fp32", tmp_path / "bundles", [9])[9]
    (tmp_path / "mine.py").write_text(
        "from tests.replay.nets import build\n\ndef made():\n    return build('norm-fp32')[0]\n"
    )
    done = rerun(path, model=f"{tmp_path / 'mine.py'}:made")
    assert done.same_bits and done.replayed.same_bits and done.step == 9, done.lines()
    earlier = rerun(path, 8, model=f"{tmp_path / 'mine.py'}:made") if len(read_bundle(path).steps) > 1 else done
    assert earlier.same_bits


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("return build('plain-fp32')", "no parameter '1.weight'"),
        ("m, o = build('norm-fp32'); return m, torch.optim.SGD(m.parameters(), lr=1.0)", "optimizers are"),
        ("m, o = build('norm-fp32'); m[4] = torch.nn.Linear(24, 4); return m", "4.weight is float32"),
        ("return 3", "returned a int"),
        ("raise OSError('no disk')", "OSError: no disk"),
    ],
)
def test_another_model_is_refused(tmp_path: Path, change: str, said: str) -> None:
    path, _ = train("norm-fp32", tmp_path / "bundles", [5])[5]
    (tmp_path / "mine.py").write_text(
        f"import torch\nfrom tests.replay.nets import build\n\ndef made():\n    {change}\n"
    )
    with pytest.raises(UsageError, match=said) as caught:
        rerun(path, model=f"{tmp_path / 'mine.py'}:made")
    assert caught.value.remedy and caught.value.exit_code == 2
    for model in (None, "mine.py", "nothing.py:made", f"{tmp_path / 'mine.py'}:other"):
        with pytest.raises(UsageError):
            rerun(path, model=model)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train("norm-fp32", tmp_path_factory.mktemp("whole"), [6])[6][0]


def forged(whole: Path, folder: Path, change: Any) -> Path:
    """A bundle whose sums are right and whose content was changed by ``change(json)``."""
    target = folder / whole.name
    target.mkdir()
    (target / "tensors.safetensors").write_bytes((whole / "tensors.safetensors").read_bytes())
    told = json.loads((whole / "bundle.json").read_text())
    change(told)
    (target / "bundle.json").write_text(json.dumps(told))
    write_manifest(target, 6)
    return target


def operations(told: Any) -> list[Any]:
    return [each for each in told["body"]["way"][-1]["program"] if each["is"] == "Operation"]


def call(told: Any) -> Any:
    return next(each for each in told["body"]["way"][-1]["program"] if each["is"] == "Call")


FORGERIES: dict[str, Any] = {
    "os.system": lambda told: operations(told)[0].update(function="os.system"),
    "through torch": lambda told: operations(told)[0].update(function="torch.os.system"),
    "torch.load": lambda told: operations(told)[0].update(function="torch.load"),
    "a callable": lambda told: operations(told)[0].update(function="torch.Tensor.apply_"),
    "private": lambda told: operations(told)[0].update(function="torch.Tensor.__reduce_ex__"),
    "no function": lambda told: operations(told)[0].update(function=None),
    "an unknown instruction": lambda told: operations(told)[0].update({"is": "Run"}),
    "one field more": lambda told: operations(told)[0].update(more=1),
    "a module for a dtype": lambda told: call(told).update(autocast=["tuple", True, ["dtype", "os"], True]),
    "an object from codec": lambda told: call(told).update(kwargs={"__dtype__": "os"}),
    "a word for a number": lambda told: call(told).update(root="0"),
    "a root too many": lambda told: call(told).update(root=1),
    "a negative root": lambda told: call(told).update(root=-1),
    "a mode missing": lambda told: call(told).update(training=["tuple", True]),
    "a parameter too many": lambda told: call(told).update(args=["tuple", ["parameter", 99]]),
    "an unknown tag": lambda told: call(told).update(args=["tuple", ["import", "os"]]),
    "a tensor that is not there": lambda told: call(told).update(args=["tuple", ["tensor", {"__tensor__": "x"}, 0, 0]]),
    "a view beyond its memory": lambda told: call(told)["args"][1][1].__setitem__(
        slice(0, None), ["view", {"__tensor__": "snapshot.buffers.1.1"}, 0, False, [9999], [1]]
    ),
    "a weight missing": lambda told: told["body"]["snapshot"]["parameters"].pop(),
    "no generator": lambda told: told["body"].update(rng=["dict"]),
    "no steps": lambda told: told["body"].update(way=[]),
    "another kind": lambda told: told.update(kind="crash-loop"),
    "deep": lambda told: call(told).update(args=json.loads("[" * 900 + "]" * 900)),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", FORGERIES)
def test_a_forged_bundle_is_refused(whole: Path, tmp_path: Path, name: str) -> None:
    path = forged(whole, tmp_path, FORGERIES[name])
    with pytest.raises(BundleError) as caught:
        read_bundle(path)
    assert caught.value.remedy


@pytest.mark.parametrize("value", [3, ["list", 3], ["dict", ["weight", 3]]])
@pytest.mark.parametrize("name", ["forward", "_parameters", "_modules"])
def test_an_attribute_takes_the_place_of_no_code(whole: Path, tmp_path: Path, name: str, value: object) -> None:
    path = forged(whole, tmp_path, lambda told: told["body"]["snapshot"]["attributes"][1].append([name, value]))
    (tmp_path / "mine.py").write_text(
        "from tests.replay.nets import build\n\ndef made():\n    return build('norm-fp32')\n"
    )
    with pytest.raises(BundleError, match=f"Sequential.{name} is a|Linear.{name} is a"):
        rerun(path, model=f"{tmp_path / 'mine.py'}:made")


def test_other_bits_are_a_finding(whole: Path, tmp_path: Path) -> None:
    text = (
        "from tests.replay.nets import build\n\ndef made():\n    m, o = build('norm-fp32'); m[3].p = 0.5; return m, o\n"
    )
    (tmp_path / "mine.py").write_text(text)
    done = rerun(whole, model=f"{tmp_path / 'mine.py'}:made")
    assert done.exit_code == 1 and not done.replayed.same_bits and "losses was" in done.outcome
    found = [each for each in done.findings if each.code == "resources.not_reproducible"]
    assert found and "two runs in this process agree" in found[0].cause and found[0].evidence
    assert explain(found[0].code)


@pytest.mark.parametrize("name", ["bundle.json", "tensors.safetensors", MANIFEST])
def test_a_flipped_byte_is_found(whole: Path, tmp_path: Path, name: str) -> None:
    path = forged(whole, tmp_path, lambda told: None)
    content = bytearray((path / name).read_bytes())
    content[len(content) // 2] ^= 1
    (path / name).write_bytes(content)
    with pytest.raises(BundleError):
        read_bundle(path)


def test_a_pickle_is_not_read(whole: Path, tmp_path: Path) -> None:
    path = forged(whole, tmp_path, lambda told: None)

    class Bad:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "executed"),)

    (path / "tensors.safetensors").write_bytes(pickle.dumps(Bad()))
    write_manifest(path, 6)
    with pytest.raises(BundleError):
        read_bundle(path)
    (path / "tensors.safetensors").unlink()
    with pytest.raises(BundleError, match="missing"):
        read_bundle(path)
    assert not (tmp_path / "executed").exists()


def test_tensors_of_other_shapes_are_refused(whole: Path, tmp_path: Path) -> None:
    path = forged(whole, tmp_path, lambda told: None)
    tensors = load_file(path / "tensors.safetensors")
    save_file({name: each.flatten()[:1].clone() for name, each in tensors.items()}, path / "tensors.safetensors")
    write_manifest(path, 6)
    (tmp_path / "mine.py").write_text(
        "from tests.replay.nets import build\n\ndef made():\n    return build('norm-fp32')\n"
    )
    with pytest.raises(BundleError):
        rerun(path, model=f"{tmp_path / 'mine.py'}:made")


def test_functions_by_name_come_back_as_they_are() -> None:
    known = serialization._functions()
    assert len(known) > 900
    for name in ("torch.nn.functional.cross_entropy", "torch.Tensor.__getitem__", "torch.Tensor.__rsub__"):
        assert serialization.function_of(name) is known[name]
    for name in ("torch.Tensor.T.__get__", "torch.functional.einsum", "torch.Tensor.mean"):
        assert callable(serialization.function_of(name))
    for other in (
        "torch.hub.load",
        "torch.Tensor.map_",
        "torch.Tensor.__setstate__",
        "torch.Tensor.register_hook",
        "",
        3,
    ):
        with pytest.raises(ValueError):
            serialization.function_of(other)  # type: ignore[arg-type]


class Opaque:
    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


class Takes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, given: Opaque) -> Any:
        return self.linear(given.x)


def test_what_cannot_be_kept_is_said_and_the_rest_is_there(tmp_path: Path) -> None:
    model = Takes()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with tw.watch(model, optimizer, out=None, quiet=True) as watching:
        for _ in range(3):
            optimizer.zero_grad()
            model(Opaque(torch.randn(5, 4))).square().mean().backward()
            optimizer.step()
        session = watching.session
        path = keep(tmp_path, session.runner.replayer, session.ring, 3, {})
    assert path is not None
    bundle = read_bundle(path)
    assert bundle.blind is not None and "Opaque" in bundle.blind
    kept = bundle.steps[-1].calls[0].args[0]
    assert kept.tensors[0].shape == (5, 4) and bundle.snapshot.parameters[0].shape == (2, 4)
    done = rerun(path)
    assert done.exit_code == 1 and "cannot be replayed" in done.outcome and not done.findings


def mine(x: torch.Tensor) -> Any:
    return torch.overrides.handle_torch_function(mine, (x,), x) if torch.overrides.has_torch_function((x,)) else x * 2


def test_a_function_that_is_not_of_torch_is_not_kept(tmp_path: Path) -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with tw.watch(model, optimizer, out=None, quiet=True) as watching:
        for _ in range(3):
            mine(model(torch.randn(5, 4))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        examiner = watching.session.runner
        path = keep(tmp_path, examiner.replayer, watching.session.ring, 3, {})
    assert path is not None
    bundle = read_bundle(path)
    assert bundle.blind is not None and "mine" in bundle.blind
    assert len(bundle.snapshot.parameters) == 2


def test_the_first_and_the_newest_stay(tmp_path: Path) -> None:
    for step in (3, 5, 8, 13, 21):
        (tmp_path / f"step-{step:08d}").mkdir()
        (tmp_path / f"step-{step:08d}" / "bundle.json").write_text('{"kind": "step"}')
    (tmp_path / "step-00000004").mkdir()
    (tmp_path / "step-00000004" / "bundle.json").write_text('{"step": 4, "deaths": []}')
    assert kind_of(tmp_path / "step-00000004") == "crash-loop" and kind_of(tmp_path) is None
    prune(tmp_path, keep=3)
    assert sorted(int(each.name[5:]) for each in tmp_path.iterdir()) == [3, 4, 13, 21]


@pytest.mark.slow
def test_a_bundle_of_a_crash_loop_is_not_replaced(tmp_path: Path) -> None:
    there = tmp_path / "step-00000006"
    there.mkdir()
    (there / "bundle.json").write_text('{"step": 6, "deaths": []}')
    path, _ = train("plain-fp32", tmp_path, [6])[6]
    assert path != there and kind_of(path) == "step" and read_bundle(path).step == 6
    again, _ = train("plain-fp32", tmp_path, [6])[6]
    assert again == path and not list(tmp_path.glob(".*"))


@pytest.mark.slow
def test_a_watched_run_is_replayed_from_its_bundles(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text("")
    (tmp_path / "mine.py").write_text(
        "from tests.replay.nets import build\n\ndef made():\n    return build('norm-fp32')\n"
    )
    train("norm-fp32", tmp_path / "bundles", [4, 10])
    done = rerun(tmp_path, 10, model=f"{tmp_path / 'mine.py'}:made")
    assert done.same_bits and done.source.name == "step-00000010"
    for step, message in ((2, "has no bundle of step 2"), (None, "keeps several bundles")):
        with pytest.raises(UsageError, match=message) as caught:
            rerun(tmp_path, step, model=f"{tmp_path / 'mine.py'}:made")
        assert "10" in caught.value.remedy


def test_slots_and_operations_survive(whole: Path) -> None:
    bundle = read_bundle(whole)
    made = [each for each in bundle.steps[-1].program if isinstance(each, Operation)]
    assert [each.function for each in made if each.name == "cross_entropy"] == [F.cross_entropy] * 2
    assert bundle.about["loss"] > 0 and bundle.about["bad"] != bundle.about["bad"]
