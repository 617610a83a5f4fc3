"""The bed: which mutants count, as they were judged, and how a watch does on them.

``mutants.json`` holds the verdicts. They are measured by ``python -m benchmarks.mutants --judge``, and stale as soon as
a host, what judges it or an operator changes. ``mutants_wide.json`` holds those on further sites of the open pairs, by
``--judge --wide``: laws that were written for the mutants of the first file are measured with those of the second.
``mutants_further.json`` holds those on the further hosts, some operators of each, judged over 5 seeds of the host.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TypedDict, cast

import torch

from trainwright.runlog.records import Found
from zoo.mutant_runs import Verdict, Watched, verdict, watched_mutant
from zoo.mutate import FOLDER, FURTHER, FURTHER_FOLDER, HOSTS, Mutant, by_name, drawn, is_kept_out, program

VERDICTS, WIDE_VERDICTS, FURTHER_VERDICTS = (
    Path(__file__).parent / name for name in ("mutants.json", "mutants_wide.json", "mutants_further.json")
)
DRAWN, TRIED = 1, 4
"""Of each operator and host so many mutants that do harm, found among so many sites."""
WIDE_DRAWN, WIDE_TRIED = 2, 4
"""The same for the sites that were not tried so."""
SHARED = ("worlds.py", "corridor.py", "quality.py", "report.py")
FURTHER_SHARED = ("worlds.py", "quality.py")
OPERATED = ("program.py", "mutation_operators.py")

FAMILIES = {
    "mode": "program function",
    "opt": "update program vitals",
    "prec": "precision",
    "num": "precision vitals",
    "sched": "program vitals",
    "init": "vitals function",
    "loop": "program vitals",
    "model": "function vitals",
    "grad": "gradient vitals",
    "mem": "resources",
    "perf": "resources",
    "accum": "gradient",
    "ckpt": "resume",
    "average": "averages",
    "metric": "averages",
}
"""The families that a code belongs to, by its first part; one that is not listed is a family itself. A broken law
without a name is ``law.<family>.<law>``."""
ACCEPTED = {
    "model": "function gradient vitals precision",
    "data": "data vitals loss",
    "loss": "loss data gradient vitals precision resources",
    "backward": "gradient program",
    "optimizer": "update program vitals",
    "schedule": "program vitals update",
    "clip": "gradient update program vitals",
    "precision": "precision gradient program",
    "average": "averages program update",
    "evaluation": "function data averages program loss",
    "mode": "function program",
    "resume": "resume program update",
}
"""Which families explain a change of what was touched."""


@dataclass(frozen=True)
class Score:
    """How a watch did on a mutant. ``new`` are its alarms that the host with the same seed does not have."""

    name: str
    seed: int
    diff: str
    harm: str
    kept_out: bool
    detected: bool = False
    family: bool = False
    line: bool = False
    right: bool = False
    new: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    seconds: float = 0.0
    error: str | None = None

    def to_json(self) -> dict[str, object]:
        return asdict(self)

    @property
    def effect(self) -> str:
        """What suffers: the numbers that are shown, the memory, or the model."""
        if self.harm.startswith("shows"):
            return "what is shown is wrong"
        return self.harm if self.harm == "graphs are kept" else "the model is worse"

    @property
    def host(self) -> str:
        return self.name.split(":")[0]

    @property
    def operator(self) -> str:
        return self.name.split(":")[1]


class Stored(TypedDict):
    """A file of verdicts: the state that each host had, and the verdicts by name."""

    hosts: dict[str, str]
    verdicts: dict[str, list[str]]


def judged(*, wide: bool = False, further: bool = False) -> dict[str, Verdict]:
    """The verdicts that are stored, by the name of the mutant."""
    return {name: Verdict(*each) for name, each in _stored(_file(wide, further))["verdicts"].items()}


def _file(wide: bool, further: bool) -> Path:
    return FURTHER_VERDICTS if further else WIDE_VERDICTS if wide else VERDICTS


def _stored(file: Path) -> Stored:
    return cast(Stored, json.loads(file.read_text())) if file.exists() else Stored(hosts={}, verdicts={})


def bed(*, kept_out: bool = False, wide: bool = False, further: bool = False) -> list[str]:
    """Names of the mutants that do harm, of one part. The wide bed and the further one have none that is kept out."""
    names = [name for name, each in judged(wide=wide, further=further).items() if each.kind == "harmful"]
    return [name for name in names if is_kept_out(name.split(":")[1], name.split(":")[0]) == kept_out]


def state_of(host: str) -> str:
    """A hash of what the verdicts on a host depend on, comments left out."""
    files = [FOLDER / name for name in (f"{host}.py", *SHARED)]
    if host in FURTHER:
        files = [FURTHER_FOLDER / name for name in (f"{host}.py", *FURTHER_SHARED)] + [FOLDER / "report.py"]
    files += [FOLDER.parent / name for name in OPERATED]
    texts = [ast.unparse(ast.parse(path.read_text())) for path in files]
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


def is_stale(host: str, *, wide: bool = False) -> bool:
    return bool(_stored(_file(wide, host in FURTHER))["hosts"].get(host) != state_of(host))


def judge(host: str, operators: Sequence[str], wide: bool = False) -> dict[str, list[str]]:
    """Verdicts on mutants of a host: by each operator in the order drawn, until enough of them do harm."""
    torch.set_num_threads(1)
    enough = WIDE_DRAWN if wide else DRAWN
    found: dict[str, list[str]] = {}
    for operator in operators:
        harmful = 0
        for mutant in _tried(host, operator, wide):
            one = verdict(host, mutant.source)
            found[mutant.name] = [one.kind, one.why]
            harmful += one.kind == "harmful"
            if harmful == enough:
                break
    return found


def _tried(host: str, operator: str, wide: bool) -> Sequence[Mutant]:
    mutants = drawn(host, operator)
    if not wide:
        return mutants[:TRIED]
    known = judged()
    new = [each for each in mutants if each.name not in known]
    return [] if is_kept_out(operator, host) else new[:WIDE_TRIED]


def store(
    verdicts: Mapping[str, Sequence[str]], fresh: Sequence[str], *, wide: bool = False, further: bool = False
) -> None:
    """Writes the verdicts; ``fresh`` are the hosts that were judged with every operator."""
    file, order = _file(wide, further), {host: i for i, host in enumerate((*HOSTS, *FURTHER))}
    names = sorted(verdicts, key=lambda each: (order[each.split(":")[0]], each))
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(list(verdicts[name]))}" for name in names)
    hosts = json.dumps({**_stored(file)["hosts"], **{host: state_of(host) for host in fresh}}, indent=1)
    file.write_text(f'{{"hosts": {hosts},\n "verdicts": {{\n{lines}\n}}}}\n')


def twin(host: str, seed: int) -> Watched:
    """The host unchanged under the watch; for a process of a pool."""
    torch.set_num_threads(1)
    return watched_mutant(None, host, seed)


def score(name: str, seed: int, known: Set[str]) -> Score:
    """One mutant under the watch; ``known`` are the alarms of its host. For a process of a pool."""
    torch.set_num_threads(1)
    mutant = by_name(name)
    seen = watched_mutant(mutant, mutant.host, seed)
    new = [each for each in seen.alarms if each.code not in known]
    verdicts = judged() | judged(wide=True) | judged(further=True)
    families = [fits_family(each.code, mutant) for each in new]
    lines = [fits_line(each, mutant) for each in new]
    right = [line or (family and fits_module(each, mutant, seen)) for each, family, line in zip(new, families, lines)]
    return Score(
        name, seed, mutant.diff, verdicts.get(name, Verdict("")).why, mutant.kept_out,
        bool(new), any(families), any(lines), any(right),
        [f"{each.code}@{each.step}" for each in new], [f"{each.code}@{each.step}" for each in seen.found],
        seen.seconds, seen.error or "; ".join(seen.failures) or None,
    )  # fmt: skip


def touched(mutant: Mutant) -> set[str]:
    """What the changed lines are about."""
    return {program(mutant.host).touched(line) for line in mutant.lines}


def fits_family(code: str, mutant: Mutant) -> bool:
    prefix = code.removeprefix("law.").split(".")[0]
    accepted = {family for kind in touched(mutant) for family in ACCEPTED[kind].split()}
    return bool(accepted & set(FAMILIES.get(prefix, prefix).split()))


def fits_line(found: Found, mutant: Mutant) -> bool:
    """Whether a finding points at most two lines beside a line that was changed."""
    file, _, line = (found.where.source or "").rpartition(":")
    return file == f"{mutant.host}.py" and any(abs(int(line) - each) <= 2 for each in mutant.lines)


def fits_module(found: Found, mutant: Mutant, seen: Watched) -> bool:
    """Of what was changed in the model: a module of the class that was changed, one within it, or one that it names."""
    base = program(mutant.host)
    changed = [
        each for each in base.tree.body
        if any(each.lineno <= line <= (each.end_lineno or 0) for line in mutant.lines) and "model" in touched(mutant)
    ]  # fmt: skip
    classes = {name for each in changed if (name := getattr(each, "name", None))}
    if not classes:
        return True
    path = found.where.module
    if path is None:
        return False
    named = set(re.findall(r"self\.(\w+)", " ".join(base.lines[line - 1] for line in mutant.lines)))
    above = [".".join(path.split(".")[:i]) for i in range(len(path.split(".")) + 1)]
    return bool(named & set(path.split("."))) or any(seen.modules.get(each) in classes for each in above if each)
