"""Records the origin of a run: code, packages, machine, data, seeds. Never fails: what is unknown is null."""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import inspect
import os
import platform
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import chain
from pathlib import Path
from types import FunctionType
from typing import TypeVar

from trainwright.runs.json_values import JsonValue
from trainwright.runs.secrets import masked

T = TypeVar("T")
_Definition = FunctionType | type[object]

# Packages that change the numbers of a run. The hash covers every installed package.
_PACKAGES = (
    *("trainwright", "torch", "numpy", "safetensors", "triton", "torchvision", "torchaudio", "torchao"),
    *("transformers", "peft", "datasets", "tokenizers", "accelerate", "bitsandbytes", "scikit-learn"),
    *("nvidia-nccl-cu12", "nvidia-nccl-cu13", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13"),
)
_VARIABLES = re.compile(
    r"(TORCH|PYTORCH|NCCL|CUDA|CUBLAS|CUDNN|NVIDIA_TF32|OMP|MKL|OPENBLAS|KMP|GLOO|HF_HUB_OFFLINE)"
    r"|(PYTHONHASHSEED|RANK|LOCAL_RANK|WORLD_SIZE|SLURM_JOB_ID|SLURM_NNODES|SLURM_NTASKS|LD_PRELOAD)$"
)
_FIELD = re.compile(r"^(Name|Version):[ \t]*(.*?)[ \t\r]*$", re.MULTILINE)
_SECRET = re.compile(r"TOKEN|SECRET|PASS|CREDENTIAL|AUTH|(^|_)API|KEY", re.IGNORECASE)
_REPOSITORY_VARIABLES = re.compile(
    r"GIT_(DIR|COMMON_DIR|WORK_TREE|PREFIX|INDEX_FILE|NAMESPACE|OBJECT_DIRECTORY|ALTERNATE_OBJECT_DIRECTORIES|SHALLOW_FILE"
    r"|GRAFT_FILE|REPLACE_REF_BASE|EXTERNAL_DIFF)$"
)
_NO_FILE = ("__main__", "trainwright")  # modules whose file is not hashed
_LIVE = "live"  # the module name of an object that was passed in Python


def provenance(
    *,
    data_fingerprints: Mapping[str, str],
    seeds: Mapping[str, int],
    command: Sequence[str],
    folder: Path | None = None,
    modules: Sequence[str] = (),
    live: Iterable[object] = (),
) -> dict[str, JsonValue]:
    """Return plain values for provenance.json. ``folder`` is the user's working directory (None: the current one).

    ``modules`` are the imported modules of the run's code, see ``modules_of``. ``live`` are the objects that train:
    their classes and functions may be defined elsewhere, often in ``__main__``.
    """
    return {
        "command": masked(list(command)),
        "working_directory": _or_none(lambda: str((folder or Path.cwd()).resolve())),
        "git": _or_none(lambda: _git_state(folder or Path.cwd())),
        "sources": sources(modules, live),
        "python": sys.version.split()[0],
        "platform": _or_none(platform.platform),
        "hostname": _or_none(socket.gethostname),
        "packages": _or_none(_packages),
        "environment": environment(os.environ),
        "driver": _or_none(_driver),
        "data": dict(data_fingerprints),
        "seeds": dict(seeds),
    }


def modules_of(recipe: Mapping[str, object]) -> list[str]:
    """Return the modules that a recipe names as ``use: module:callable``; objects made in Python have none."""
    uses = [use for part in _parts(recipe) if isinstance(use := part.get("use"), str) and ":" in use]
    return sorted({use.partition(":")[0] for use in uses} - {_LIVE})


def _parts(section: Mapping[str, object]) -> Iterator[Mapping[str, object]]:
    yield section
    for key, value in section.items():
        if key != "args" and isinstance(value, Mapping):
            yield from _parts(value)


def sources(modules: Sequence[str], live: Iterable[object] = ()) -> dict[str, str | None]:
    """Return the sha256 of each module's file, and of the source of classes and functions of ``live`` in other files.

    Null if there is no source. Definitions of Trainwright, Python or an installed package are left out, because their
    versions are recorded. In ``__main__`` only the objects that train count: the rest starts and resumes runs.
    """
    files = {m: _or_none(partial(_file_sha256, m)) for m in sorted(modules) if m.partition(".")[0] not in _NO_FILE}
    texts: dict[str, set[str]] = {}
    for each in dict.fromkeys(chain.from_iterable(map(_definitions, live))):
        if each.__module__ not in files:
            text = _or_none(partial(_source, each))
            texts.setdefault(f"{each.__module__}.{each.__qualname__}", set()).add(text or "")
    return files | {name: None if "" in found else _sha256("".join(sorted(found))) for name, found in texts.items()}


def module_of(thing: object) -> str | None:
    """Return the module that defines the class or function of a live object; None if it is not the user's code."""
    return next((each.__module__ for each in _definitions(thing)[:1]), None)


def _definitions(thing: object) -> list[_Definition]:
    """Return ``thing`` if it is a function, else its class and base classes; only those in the user's code."""
    while isinstance(thing, partial):
        thing = thing.func
    if inspect.ismethod(thing):
        thing = thing.__self__
    classes = (thing if inspect.isclass(thing) else type(thing)).__mro__
    return [each for each in ([thing] if inspect.isfunction(thing) else classes) if _is_user_module(each.__module__)]


@cache
def _is_user_module(module: str | None) -> bool:
    if module in (None, "__main__"):  # also if ``python -m`` has started a notebook server: it runs the user's code
        return True
    if module.partition(".")[0] in (*sys.stdlib_module_names, "trainwright"):
        return False
    file = getattr(sys.modules.get(module), "__file__", None)
    return file is None or not {"site-packages", "dist-packages"} & {*Path(file).parts}


def _source(thing: _Definition) -> str:
    """Return the source of a class or function. Raises if there is none."""
    if inspect.isclass(thing):
        try:
            return inspect.getsource(thing)
        except (OSError, TypeError):  # defined in a notebook: its methods can still be found
            return "".join(inspect.getsource(each) for each in vars(thing).values() if inspect.isfunction(each))
    if thing.__name__ != "<lambda>":
        return inspect.getsource(thing)
    text = "".join(inspect.findsource(thing)[0])  # the line found may be that of the ``tw.fit`` call
    lambdas = [each for each in ast.walk(ast.parse(text)) if isinstance(each, ast.Lambda)]
    here = [each for each in lambdas if each.lineno == thing.__code__.co_firstlineno]
    return "".join(ast.get_source_segment(text, each) or "" for each in here)


def _file_sha256(module: str) -> str | None:
    file = sys.modules[module].__file__
    return hashlib.sha256(Path(file).read_bytes()).hexdigest() if file else None


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that can change a run's numbers or speed, by name; nothing that looks like a secret."""
    return {
        name: masked(value)
        for name, value in sorted(variables.items())
        if _VARIABLES.match(name) and not _SECRET.search(name)
    }


def _or_none(read: Callable[[], T]) -> T | None:
    """Return the result of ``read``, or None: an error here must not stop a training run."""
    try:
        return read()
    except Exception:
        return None


def _git_state(folder: Path) -> dict[str, JsonValue] | None:
    """Return commit, dirty flag (counts untracked files), and hash of uncommitted changes; None outside a git tree.

    No command from the repository's configuration is run. Git has no switch to disable its filters, so if the
    repository configures any, only the commit is known. Uncommitted changes in submodules are ignored.
    """
    if _git(folder, "rev-parse", "--is-inside-work-tree") is None:
        return None
    status = None
    if _has_no_filters(folder):
        status = _git(folder, "status", "--porcelain=v2", "--branch", "--ignore-submodules=dirty")
    if status is None:
        known = _git(folder, "rev-parse", "--verify", "HEAD")
        return {"commit": known.decode().strip() if known else None, "dirty": None, "diff_sha256": None}
    lines = status.decode(errors="replace").splitlines()
    files = [line for line in lines if not line.startswith("#")]
    commit = next((line.split()[-1] for line in lines if line.startswith("# branch.oid ")), "(initial)")
    changes = None
    if any(not line.startswith("?") for line in files):  # tracked files
        changes = _git(folder, "diff", "--no-ext-diff", "--no-textconv", "--ignore-submodules=dirty", "HEAD")
    return {
        "commit": None if commit == "(initial)" else commit,
        "dirty": bool(files),
        "diff_sha256": hashlib.sha256(changes).hexdigest() if changes else None,
    }


def _has_no_filters(folder: Path) -> bool:
    """Return True if the repository configures no filter commands. Filters of the user's configuration may run."""
    listed = _git(folder, "config", "--list", "--show-scope", "--includes", "--name-only", "-z")
    if listed is None:  # a git before 2.26
        return False
    words = listed.decode(errors="replace").split("\0")
    return not any(
        scope in ("local", "worktree") and key.lower().startswith("filter.")
        for scope, key in zip(words[::2], words[1::2], strict=False)
    )


def _git(folder: Path, *arguments: str) -> bytes | None:
    """Return git's output, or None when it fails. Takes no lock, so it does not disturb other work in that tree.

    Git runs no hook and no monitor of the repository, and fetches nothing. Environment variables that select a
    repository, as in a git hook that starts a run, are removed, so git always uses the repository around ``folder``.
    """
    answer = subprocess.run(
        ["git", "-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null", *arguments],
        cwd=folder,
        env={name: value for name, value in os.environ.items() if not _REPOSITORY_VARIABLES.match(name)}
        | {"GIT_OPTIONAL_LOCKS": "0", "GIT_ALLOW_PROTOCOL": "none", "LC_ALL": "C"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=20,  # a huge tree on a network mount must not delay the start
        check=False,
    )
    return answer.stdout if answer.returncode == 0 else None


@cache
def _packages() -> dict[str, JsonValue]:
    """Return the installed packages, read once: later installations do not change what this process has imported."""
    found = (_name_and_version(dist) for dist in importlib.metadata.distributions())
    installed = {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in found if name}
    every = "\n".join(f"{name}=={version}" for name, version in sorted(installed.items()))
    return {
        "versions": {name: installed[name] for name in _PACKAGES if name in installed},
        "count": len(installed),
        "sha256": hashlib.sha256(every.encode()).hexdigest(),
    }


def _name_and_version(dist: importlib.metadata.Distribution) -> tuple[str, str]:
    """Return name and version from the raw metadata.

    ``dist.metadata`` would parse each README, which takes 0.1 s per start for a hundred packages.
    """
    text = dist.read_text("METADATA") or dist.read_text("PKG-INFO") or ""
    fields = dict(reversed(_FIELD.findall(text.partition("\n\n")[0])))  # the first of several applies
    return fields.get("Name", ""), fields.get("Version", "")


def _driver() -> str:
    """Return the NVIDIA driver's version. Raises when there is none."""
    import pynvml

    pynvml.nvmlInit()
    try:
        return str(pynvml.nvmlSystemGetDriverVersion())
    finally:
        pynvml.nvmlShutdown()
