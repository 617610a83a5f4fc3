"""``launch slurm`` and ``launch kubernetes``: the file by which a scheduler runs a recipe on several machines.

Both start one torchrun a machine, which meet on the first one; both ask a run to save before they end it, and start the
job again when the ranks say that this was done (exit code 75).
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainwright.errors import RecipeError, StorageError, UsageError
from trainwright.recipe import Loaded
from trainwright.recipe.yaml_core import write_all
from trainwright.training.problems import problems_of

RESTARTS = 3
"""How often torchrun starts the ranks again before the job fails; each time they resume from the newest checkpoint."""
FAILURES_OF_A_POD = 3
"""The same for pods that end otherwise than stopped and saved, for each node of the job."""
NOT_TRIED_AGAIN = (2, 3)
"""Exit codes that another attempt would give again: a wrong command line or recipe; a critical finding."""
STOPPED_AND_SAVED = 75
MARGIN_S = 30
"""Of the grace: what is left for torchrun to end the ranks that are not done, and to end itself."""
LEAST_GRACE_S = 60
MEETING_PORT = 29500


@dataclass(frozen=True)
class Shape:
    """A job of ``nodes`` machines with ``each`` ranks."""

    nodes: int
    each: int

    @classmethod
    def parse(cls, text: str) -> Shape:
        """Reads ``2x8``; ``8`` is one machine. Raises UsageError."""
        found = re.fullmatch(r"(?:([1-9]\d*)x)?([1-9]\d*)", text.strip().lower())
        if found is None:
            raise UsageError(
                f"{text!r} does not say how many ranks", remedy="give machines x ranks of each: --ranks 2x8"
            )
        return cls(int(found[1] or 1), int(found[2]))


@dataclass(frozen=True)
class JobFile:
    """The file for a scheduler. ``path`` is where it was written, None: only printed."""

    text: str
    submit: str
    path: Path | None = None

    exit_code = 0

    def lines(self) -> list[str]:
        """The file itself, or where it is and what to do with it."""
        return self.text.splitlines() if self.path is None else [str(self.path), f"  {self.submit} {self.path}"]

    def to_json(self) -> dict[str, object]:
        """What ``--json`` prints."""
        return {"text": self.text, "path": None if self.path is None else str(self.path), "exit": 0}

    def written(self, path: Path | None) -> JobFile:
        """Writes it there, if anywhere. Raises StorageError."""
        if path is None:
            return self
        try:
            path.write_text(self.text, "utf-8")
        except OSError as error:
            raise StorageError(f"{path} cannot be written: {error}", remedy="give another --output") from None
        return JobFile(self.text, self.submit, path)


def slurm_job(
    loaded: Loaded,
    shape: Shape,
    *,
    settings: Sequence[str] = (),
    grace_s: int = 120,
    directives: Sequence[str] = (),
) -> JobFile:
    """An sbatch script. ``directives`` are options of sbatch without their hyphens: ``partition=gpu``.

    Raises RecipeError where the layout of the recipe does not suit the ranks, UsageError for wrong options.
    """
    _require(loaded, shape, grace_s)
    own = {
        "job-name": f"job-name={loaded.recipe.name}",
        "nodes": f"nodes={shape.nodes}",
        "ntasks-per-node": "ntasks-per-node=1",
        **({"gpus-per-node": f"gpus-per-node={shape.each}"} if loaded.recipe.device != "cpu" else {}),
        "signal": f"signal=B:USR1@{grace_s}",
        "requeue": "requeue",
        "open-mode": "open-mode=append",
    }
    header = sbatch_header(own, directives)
    program = [sys.executable, "-m", "trainwright", *_command(str(Path(loaded.source.name).absolute()), settings)]
    meeting = f'"$first:$port" --rdzv-id "$SLURM_JOB_ID" {_limits(grace_s)}'
    return JobFile(
        _SBATCH.format(
            name=loaded.recipe.name,
            header=header,
            grace_s=grace_s - MARGIN_S,
            program=shlex.join(program),
            nodes=shape.nodes,
            each=shape.each,
            meeting=meeting,
            stopped=STOPPED_AND_SAVED,
        ),
        "sbatch",
    )


def sbatch_header(own: Mapping[str, str], directives: Sequence[str]) -> str:
    """The ``#SBATCH`` lines; ``directives`` replace those of the same name. Raises UsageError for what is no option."""
    options = {text.partition("=")[0].lstrip("-"): text.lstrip("-") for text in directives}
    if any(not re.fullmatch(r"[a-z][a-z-]*(=\S+)?", each) for each in options.values()):
        raise UsageError(f"no options of sbatch: {list(directives)}", remedy="write for example --sbatch partition=gpu")
    return "\n".join(f"#SBATCH --{each}" for each in {**own, **options}.values())


_SBATCH = """\
#!/bin/bash
# {name}: made by `trainwright launch slurm`. One task a node, which is torchrun.
{header}

export TRAINWRIGHT_GRACE_S={grace_s}
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 20000))
step=
asked=

# Before the time is over, and before a preemption: srun passes the signal on to torchrun, and that to the ranks.
save() {{
    asked=yes
    [ -n "$step" ] && kill -USR1 "$step"
}}
trap save USR1

srun --kill-on-bad-exit=0 {program} -- \\
    --nnodes {nodes} --nproc-per-node {each} --rdzv-backend c10d --rdzv-endpoint {meeting} &
step=$!

wait "$step"
code=$?
while kill -0 "$step" 2>/dev/null; do # `wait` ends when USR1 comes, and is then called again
    wait "$step"
    code=$?
done
if [ "$code" -eq {stopped} ] && [ -n "$asked" ]; then # stopped and saved: the same job again, which resumes the run
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


def kubernetes_job(
    loaded: Loaded,
    shape: Shape,
    *,
    image: str,
    volume: str,
    settings: Sequence[str] = (),
    grace_s: int = 120,
) -> JobFile:
    """A manifest: the recipe as a ConfigMap, a headless Service, and an indexed Job. Needs no operator.

    ``volume`` names the PersistentVolumeClaim for the runs. Raises RecipeError
    where the layout of the recipe does not suit the ranks, UsageError for a grace that is too short.
    """
    _require(loaded, shape, grace_s, elsewhere=True)
    name, recipe = dns_label(loaded.recipe.name), Path(loaded.source.name).read_text("utf-8")
    documents = [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": {"recipe.yaml": recipe}},
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": name},
            "spec": {
                "clusterIP": "None",
                "publishNotReadyAddresses": True,  # the ranks meet before any of them is ready
                "selector": {"trainwright/run": name},
                "ports": [{"name": "meeting", "port": MEETING_PORT}],
            },
        },
        {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": name, "labels": {"trainwright/run": name}},
            "spec": _job_spec(name, shape, _container(loaded, name, shape, image, settings, grace_s), volume, grace_s),
        },
    ]
    head = f"# {name}: made by `trainwright launch kubernetes`. One pod a node, which is torchrun.\n"
    return JobFile(head + write_all(documents), "kubectl apply -f")


def _job_spec(name: str, shape: Shape, container: dict[str, object], volume: str, grace_s: int) -> dict[str, object]:
    def ends_with(codes: Sequence[int]) -> dict[str, object]:
        return {"containerName": "trainwright", "operator": "In", "values": list(codes)}

    volumes = [
        {"name": "runs", "persistentVolumeClaim": {"claimName": volume}},
        {"name": "recipe", "configMap": {"name": name}},
        {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
    ]
    return {
        "completionMode": "Indexed",
        "completions": shape.nodes,
        "parallelism": shape.nodes,
        "backoffLimit": FAILURES_OF_A_POD * shape.nodes,
        "podFailurePolicy": {  # the first rule that fits; Ignore: a new pod, which does not count as a failure
            "rules": [
                {"action": "FailJob", "onExitCodes": ends_with(NOT_TRIED_AGAIN)},
                {"action": "Ignore", "onExitCodes": ends_with([STOPPED_AND_SAVED])},
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            ]
        },
        "template": {
            "metadata": {"labels": {"trainwright/run": name}},
            "spec": {
                "restartPolicy": "Never",
                "subdomain": name,
                "terminationGracePeriodSeconds": grace_s,
                "containers": [container],
                "volumes": volumes,
            },
        },
    }


def _container(
    loaded: Loaded, name: str, shape: Shape, image: str, settings: Sequence[str], grace_s: int
) -> dict[str, object]:
    words = ["trainwright", *_command("/recipe/recipe.yaml", [*settings, "folder=/runs"]), "--"]
    words += ["--nnodes", str(shape.nodes), "--nproc-per-node", str(shape.each), "--rdzv-backend", "c10d"]
    words += ["--rdzv-endpoint", f"{name}-0.{name}:{MEETING_PORT}", "--rdzv-id", "$(JOB_UID)"]
    uid = {"fieldRef": {"fieldPath": "metadata.labels['batch.kubernetes.io/controller-uid']"}}
    found: dict[str, object] = {
        "name": "trainwright",
        "image": image,
        "command": [*words, *_limits(grace_s).split()],
        "env": [
            {"name": "JOB_UID", "valueFrom": uid},
            {"name": "TRAINWRIGHT_GRACE_S", "value": str(grace_s - MARGIN_S)},
        ],
        "volumeMounts": [
            {"name": "runs", "mountPath": "/runs"},
            {"name": "recipe", "mountPath": "/recipe", "readOnly": True},
            {"name": "shared-memory", "mountPath": "/dev/shm"},
        ],
    }
    return (
        found if loaded.recipe.device == "cpu" else {**found, "resources": {"limits": {"nvidia.com/gpu": shape.each}}}
    )


def _require(loaded: Loaded, shape: Shape, grace_s: int, *, elsewhere: bool = False) -> None:
    """Raises RecipeError with all for which the ranks would refuse the recipe, UsageError for a short grace.

    ``elsewhere``: the ranks run in a container, which may have modules and data that this machine lacks.
    """
    if found := problems_of(loaded, ranks=shape.nodes * shape.each, elsewhere=elsewhere):
        raise RecipeError(found)
    require_grace(grace_s)


def require_grace(grace_s: int) -> None:
    """Raises UsageError for a grace in which a step and its checkpoint do not fit."""
    if grace_s < LEAST_GRACE_S:
        rule = f"{MARGIN_S} s of it are for torchrun to end, the rest for the last step and its checkpoint"
        raise UsageError(f"--grace {grace_s} is too short: {rule}", remedy=f"give at least {LEAST_GRACE_S}")


def _command(recipe: str, settings: Sequence[str]) -> list[str]:
    return ["train", recipe, *(word for each in settings for word in ("--set", each))]


def _limits(grace_s: int) -> str:
    return f"--max-restarts {RESTARTS} --shutdown-timeout {grace_s - MARGIN_S}"


def dns_label(name: str) -> str:
    """The name as Kubernetes takes it for a host: so short that ``-INDEX`` can follow within 63 characters."""
    label = re.sub(r"[^a-z0-9-]+", "-", name.lower()).strip("-")[:50].strip("-")
    return label if label and label[0].isalpha() else f"run-{label}".strip("-")
