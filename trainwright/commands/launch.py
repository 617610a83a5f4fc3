"""``launch slurm``, ``kubernetes``, ``skypilot`` and ``ray``: writes job files for schedulers.

Each job file except the one for Ray starts one torchrun per machine, with the rendezvous on the first machine. Slurm
and Kubernetes send a signal before they end a job, so that the run saves. The job is restarted if the ranks exit with
75 (stopped and saved).

The functions that write a job file have these arguments:

loaded, settings  the recipe, and the overrides that the job repeats
shape             machines, and ranks of each
image             the container image
volume            the volume for the runs, which all machines must be able to write
grace_s           seconds from the signal to the kill
stack             the CUDA, driver and NCCL (``cu130``) that each machine must have, or ``trainwright env`` ends the job

They raise RecipeError if the layout of the recipe does not suit the ranks, and UsageError for a wrong option.
"""

from __future__ import annotations

import math
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path

from trainwright.errors import RecipeError, UsageError, require_choice
from trainwright.recipe import Loaded
from trainwright.recipe.yaml_core import write_all
from trainwright.report.environment import STACKS
from trainwright.runs.storage import write_output
from trainwright.training.problems import problems_of

MAX_RESTARTS = 3
"""Number of restarts after failures before the job fails. The ranks resume from the newest checkpoint."""
MAX_POD_FAILURES = 3
"""Number of failed pods per node before the job fails. Exit code 75 does not count as a failure."""
FINAL_EXIT_CODES = (2, 3)
"""Exit codes after which a restart is useless: 2 for a wrong command line or recipe, 3 for a critical finding."""
STOPPED_AND_SAVED = 75
SHUTDOWN_MARGIN_S = 30
"""Part of the grace period that is reserved for torchrun to end remaining ranks and itself."""
MIN_GRACE_S = 60
RENDEZVOUS_PORT = 29500
CONTAINER = "trainwright"
"""Name of the container, and of the executable in it."""
IMAGE_GROUP = 1000
"""Group id of the user in containers/Dockerfile. Volumes must be writable for it."""


@dataclass(frozen=True)
class Shape:
    """A job on ``nodes`` machines with ``each`` ranks per machine."""

    nodes: int
    each: int

    @classmethod
    def parse(cls, text: str) -> Shape:
        """Parse ``2x8`` (2 machines with 8 ranks each) or ``8`` (one machine). Raises UsageError."""
        found = re.fullmatch(r"(?:([1-9]\d*)x)?([1-9]\d*)", text.strip().lower())
        if found is None:
            raise UsageError(
                f"{text!r} is not a number of ranks", remedy="give machines x ranks per machine: --ranks 2x8"
            )
        return cls(int(found[1] or 1), int(found[2]))


@dataclass(frozen=True)
class JobFile:
    """A job file and the command that submits it. ``path`` is None if the file is only printed."""

    text: str
    submit: str
    path: Path | None = None

    exit_code = 0

    def lines(self) -> list[str]:
        """Return the lines of the file. If it was written, return its path and the command that submits it instead."""
        return self.text.splitlines() if self.path is None else [str(self.path), f"  {self.submit} {self.path}"]

    def to_json(self) -> dict[str, object]:
        return {"text": self.text, "path": None if self.path is None else str(self.path), "exit": 0}

    def write_to(self, path: Path | None) -> JobFile:
        """Write the file to ``path``, and return it with its path. None writes nothing. Raises StorageError."""
        if path is not None:
            write_output(path, self.text, "--output")
        return replace(self, path=path)


def slurm_job(
    loaded: Loaded,
    shape: Shape,
    *,
    settings: Sequence[str] = (),
    grace_s: int = 120,
    directives: Sequence[str] = (),
    image: str | None = None,
    stack: str | None = None,
) -> JobFile:
    """Return an sbatch script. ``directives`` are options of sbatch without hyphens, such as ``partition=gpu``.

    An ``image`` needs the Pyxis plugin. None: the job uses the current Python interpreter.
    """
    _require_launchable(loaded, shape, grace_s, elsewhere=image is not None)
    defaults = {
        "job-name": f"job-name={loaded.recipe.name}",
        "nodes": f"nodes={shape.nodes}",
        "ntasks-per-node": "ntasks-per-node=1",
        **({"gpus-per-node": f"gpus-per-node={shape.each}"} if loaded.recipe.device != "cpu" else {}),
        "signal": f"signal=B:USR1@{grace_s}",
        "requeue": "requeue",
        "open-mode": "open-mode=append",
    }
    header = _sbatch_header(defaults, directives, grace_s)
    recipe = Path(loaded.source.name).absolute()
    trainwright = [sys.executable, "-m", "trainwright"] if image is None else ["trainwright"]
    program = [*trainwright, *_command(str(recipe), settings)]
    container = "" if image is None else _PYXIS.format(image=shlex.quote(image), folder=shlex.quote(str(recipe.parent)))
    check = _stack_check(stack, loaded, shape)
    rendezvous = f'"$first:$port" --rdzv-id "$SLURM_JOB_ID" {_torchrun_limits(grace_s)}'
    return JobFile(
        _SBATCH.format(
            name=loaded.recipe.name,
            header=header,
            grace_s=grace_s - SHUTDOWN_MARGIN_S,
            container=container,
            check=_SRUN_CHECK.format(container=container, check=shlex.join([*trainwright, *check])) if check else "",
            program=shlex.join(program),
            nodes=shape.nodes,
            each=shape.each,
            rendezvous=rendezvous,
            stopped=STOPPED_AND_SAVED,
        ),
        "sbatch",
    )


def _sbatch_header(defaults: Mapping[str, str], directives: Sequence[str], grace_s: int) -> str:
    """Return the ``#SBATCH`` lines. ``directives`` replace defaults of the same name.

    Raises UsageError for invalid options, those that ``--ranks`` sets, and a time limit that leaves no time to train.
    """
    options = {text.partition("=")[0].lstrip("-"): text.lstrip("-") for text in directives}
    if any(not re.fullmatch(r"[a-z][a-z-]*(=\S+)?", each) for each in options.values()):
        raise UsageError(
            f"{list(directives)} are not options of sbatch", remedy="write for example --sbatch partition=gpu"
        )
    if taken := sorted({"nodes", "ntasks", "ntasks-per-node"} & options.keys()):
        raise UsageError(f"--ranks sets {taken[0]}, and the script relies on it", remedy="give --ranks MACHINESxRANKS")
    limit = options.get("time", "").partition("=")[2]
    if limit and _limit_s(limit) <= grace_s:  # Slurm would send the signal at once, and the job would be requeued
        rule = f"is not longer than the {grace_s} s from the signal to the kill"
        raise UsageError(f"--time {limit} {rule}", remedy="give a longer --time, or a shorter --grace")
    return "\n".join(f"#SBATCH --{each}" for each in {**defaults, **options}.values())


def _limit_s(text: str) -> float:
    """Return a time limit of Slurm in seconds. Raises UsageError for a text that sbatch does not accept."""
    days, hyphen, clock = text.rpartition("-")
    fields = clock.split(":")
    units_s = (3600, 60, 1) if hyphen or len(fields) == 3 else (60, 1)
    if text.upper() in ("UNLIMITED", "INFINITE"):
        return math.inf
    if not all(map(str.isdecimal, [*fields, *([days] if hyphen else [])])) or len(fields) > 3:
        rule = "is not a time limit of Slurm (MINUTES, HOURS:MINUTES:SECONDS or DAYS-HOURS)"
        raise UsageError(f"--time {text} {rule}", remedy="write for example --time 12:00:00")
    return int(days or 0) * 86400 + sum(int(each) * unit_s for each, unit_s in zip(fields, units_s))


_PYXIS = '--container-image={image} --container-mounts="$PWD:$PWD",{folder}:{folder} --container-workdir="$PWD" '
_SRUN_CHECK = """
# Each node compares its driver, CUDA and NCCL with the stack that this job pins.
srun {container}{check} || exit 1
"""
_SBATCH = """\
#!/bin/bash
# {name}: made by `trainwright launch slurm`. One task per node, which runs torchrun.
{header}

export TRAINWRIGHT_GRACE_S={grace_s}
[ -z "$SLURM_CPUS_PER_TASK" ] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK # srun does not inherit this option
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 20000))
step=
signaled=

# Slurm sends USR1 before a timeout or a preemption. It is forwarded to the run, which saves and exits with {stopped}.
save() {{
    signaled=yes
    [ -n "$step" ] && kill -USR1 "$step"
}}
trap save USR1
{check}
srun --kill-on-bad-exit=0 {container}{program} -- \\
    --nnodes {nodes} --nproc-per-node {each} --rdzv-backend c10d --rdzv-endpoint {rendezvous} &
step=$!

wait "$step"
code=$?
while kill -0 "$step" 2>/dev/null; do # USR1 interrupts `wait`
    wait "$step"
    code=$?
done
if [ "$code" -eq {stopped} ] && [ -n "$signaled" ]; then # stopped and saved: requeue this job, which resumes
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
    stack: str | None = None,
) -> JobFile:
    """Return a manifest with the recipe as a ConfigMap, a headless Service, and an indexed Job. Needs no operator.

    ``volume`` is the name of a PersistentVolumeClaim.
    """
    _require_launchable(loaded, shape, grace_s, elsewhere=True)
    name, check = dns_label(loaded.recipe.name), _stack_check(stack, loaded, shape)
    labels = {"trainwright/run": name}
    uid = {"fieldRef": {"fieldPath": "metadata.labels['batch.kubernetes.io/controller-uid']"}}
    words = [CONTAINER, *_command("/recipe/recipe.yaml", [*settings, "folder=/runs"]), "--"]
    words += ["--nnodes", str(shape.nodes), "--nproc-per-node", str(shape.each), "--rdzv-backend", "c10d"]
    words += ["--rdzv-endpoint", f"{name}-0.{name}:{RENDEZVOUS_PORT}", "--rdzv-id", "$(JOB_UID)"]
    limits = {"resources": {"limits": {"nvidia.com/gpu": shape.each}}} if loaded.recipe.device != "cpu" else {}
    container = {
        "name": CONTAINER,
        "image": image,
        "command": [*words, *_torchrun_limits(grace_s).split()],
        "env": [
            {"name": "JOB_UID", "valueFrom": uid},
            {"name": "TRAINWRIGHT_GRACE_S", "value": str(grace_s - SHUTDOWN_MARGIN_S)},
        ],
        "volumeMounts": [
            {"name": "runs", "mountPath": "/runs"},
            {"name": "recipe", "mountPath": "/recipe", "readOnly": True},
            {"name": "shared-memory", "mountPath": "/dev/shm"},
        ],
        **limits,
    }
    # If the check fails, the pod fails, and the next pod may be placed on another node. The init container needs the
    # same resources as the main one, because only containers with a GPU can see the driver.
    init = {"name": "env", "image": image, "command": [CONTAINER, *check], **limits}
    pod = {
        "restartPolicy": "Never",
        "subdomain": name,
        "terminationGracePeriodSeconds": grace_s,
        "securityContext": {"fsGroup": IMAGE_GROUP, "fsGroupChangePolicy": "OnRootMismatch"},
        **({"initContainers": [init]} if check else {}),
        "containers": [container],
        "volumes": [
            {"name": "runs", "persistentVolumeClaim": {"claimName": volume}},
            {"name": "recipe", "configMap": {"name": name}},
            {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
        ],
    }
    documents = [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": name},
            "data": {"recipe.yaml": Path(loaded.source.name).read_text("utf-8")},
        },
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": name},
            "spec": {
                "clusterIP": "None",
                "publishNotReadyAddresses": True,  # the rendezvous precedes readiness
                "selector": labels,
                "ports": [{"name": "rendezvous", "port": RENDEZVOUS_PORT}],
            },
        },
        {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": name, "labels": labels},
            "spec": {
                "completionMode": "Indexed",
                "completions": shape.nodes,
                "parallelism": shape.nodes,
                "backoffLimit": MAX_POD_FAILURES * shape.nodes,
                "podFailurePolicy": {"rules": _failure_rules()},
                "template": {"metadata": {"labels": labels}, "spec": pod},
            },
        },
    ]
    head = f"# {name}: made by `trainwright launch kubernetes`. Each pod runs one torchrun.\n"
    return JobFile(head + write_all(documents), "kubectl apply -f")


def _failure_rules() -> list[dict[str, object]]:
    """Return the rules for failed pods. The first that matches applies; "Ignore" starts a new pod without counting."""

    def ends_with(codes: Sequence[int]) -> dict[str, object]:
        return {"containerName": CONTAINER, "operator": "In", "values": list(codes)}

    return [
        {"action": "FailJob", "onExitCodes": ends_with(FINAL_EXIT_CODES)},
        {"action": "Ignore", "onExitCodes": ends_with([STOPPED_AND_SAVED])},
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    ]


def skypilot_job(
    loaded: Loaded,
    shape: Shape,
    *,
    image: str,
    volume: str,
    gpu: str | None = None,
    settings: Sequence[str] = (),
    stack: str | None = None,
) -> JobFile:
    """Return a SkyPilot task. ``volume`` is a SkyPilot volume (``sky volumes``).

    ``gpu`` is the accelerator of each rank, such as ``H100``. It is required unless the recipe has ``device: cpu``.
    """
    _require_launchable(loaded, shape, MIN_GRACE_S, elsewhere=True)
    on_gpu = loaded.recipe.device != "cpu"
    if on_gpu and (not gpu or ":" in gpu):
        rule = "SkyPilot needs the type of the accelerator, and --ranks gives its number"
        raise UsageError(rule, remedy="give for example --gpu H100")
    check = _stack_check(stack, loaded, shape)
    command = [*_command("/recipe/recipe.yaml", [*settings, "folder=/runs"]), "--"]
    command += ["--nnodes", str(shape.nodes), "--nproc-per-node", str(shape.each), "--rdzv-backend", "c10d"]
    lines = [
        *([shlex.join(["trainwright", *check])] if check else []),
        'first=$(echo "$SKYPILOT_NODE_IPS" | head -n 1)',
        f'trainwright {shlex.join(command)} --rdzv-endpoint "$first:{RENDEZVOUS_PORT}" \\',
        f'    --rdzv-id "$SKYPILOT_TASK_ID" {_torchrun_limits(MIN_GRACE_S)}',
    ]
    task = {
        "name": dns_label(loaded.recipe.name),
        "num_nodes": shape.nodes,
        "resources": {
            "image_id": f"docker:{image}",
            **({"accelerators": f"{gpu}:{shape.each}"} if on_gpu else {}),
            "job_recovery": {"max_restarts_on_errors": MAX_RESTARTS, "recover_on_exit_codes": [STOPPED_AND_SAVED]},
        },
        "file_mounts": {"/recipe/recipe.yaml": str(Path(loaded.source.name).absolute())},
        "volumes": {"/runs": volume},
        "run": "set -e\n" + "\n".join(lines) + "\n",
    }
    head = f"# {task['name']}: made by `trainwright launch skypilot`. One torchrun a node.\n"
    return JobFile(head + write_all([task]), "sky jobs launch")


def ray_job(loaded: Loaded, shape: Shape, *, folder: str, settings: Sequence[str] = ()) -> JobFile:
    """Return a program that trains the recipe with Ray Train, on the Ray cluster in which it is run.

    Ray starts one worker per rank, on any machines that have resources. ``folder`` is the folder for the runs: an
    absolute path that all machines can write.
    """
    _require_launchable(loaded, shape, MIN_GRACE_S)
    if not Path(folder).is_absolute():
        rule = "workers of Ray have other working folders"
        raise UsageError(f"--folder {folder} is not an absolute path: {rule}", remedy="give for example --folder /runs")
    recipe, on_gpu = Path(loaded.source.name).absolute(), loaded.recipe.device != "cpu"
    return JobFile(
        _RAY.format(
            name=loaded.recipe.name,
            recipe=str(recipe.relative_to(Path.cwd()) if recipe.is_relative_to(Path.cwd()) else recipe),
            settings=[*settings, f"folder={folder}"],
            backend="cpu:gloo,cuda:nccl" if on_gpu else "gloo",
            ranks=shape.nodes * shape.each,
            on_gpu=on_gpu,
            max_failures=MAX_RESTARTS,
        ),
        "ray job submit --working-dir . -- python",
    )


_RAY = """\
# {name}: made by `trainwright launch ray`. Each worker of Ray Train is a rank.
import os
import sys

from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

RECIPE = {recipe!r}
SETTINGS = {settings!r}


def train_rank(config: dict[str, str]) -> None:
    # The workers are in one process group. After a failure Ray starts all of them again, and they resume the run.
    import trainwright as tw

    os.chdir(config["project"])  # Ray starts each worker in another folder
    sys.path.insert(0, config["project"])
    tw.train(tw.load(RECIPE, overrides=SETTINGS))


if __name__ == "__main__":
    TorchTrainer(
        train_rank,
        train_loop_config={{"project": os.getcwd()}},
        torch_config=TorchConfig(backend={backend!r}),
        scaling_config=ScalingConfig(num_workers={ranks}, use_gpu={on_gpu}),
        run_config=RunConfig(failure_config=FailureConfig(max_failures={max_failures})),
    ).fit()
"""


def _stack_check(stack: str | None, loaded: Loaded, shape: Shape) -> list[str]:
    """Return the arguments of ``trainwright`` that check a machine against a stack; [] without a stack.

    Raises UsageError for an unknown stack, or one for the CPU with a recipe that may use a GPU.
    """
    if stack is None:
        return []
    require_choice("stack", stack, STACKS)
    on_gpu = loaded.recipe.device != "cpu"
    if on_gpu and STACKS[stack].cuda is None:
        remedy = "name a stack with CUDA, such as cu130, or write device: cpu into the recipe"
        raise UsageError(f"stack {stack} is for the CPU, and the recipe may use a GPU", remedy=remedy)
    return ["env", "--stack", stack, *(["--gpus", str(shape.each)] if on_gpu else [])]


def _require_launchable(loaded: Loaded, shape: Shape, grace_s: int, *, elsewhere: bool = False) -> None:
    """Raise RecipeError with all problems that the ranks would report, or UsageError for a short grace period.

    ``elsewhere``: the ranks run in a container, which may have modules and data that this machine does not have.
    """
    with redirect_stdout(sys.stderr):  # the job file may be printed, and user code may print as well
        found = problems_of(loaded, ranks=shape.nodes * shape.each, elsewhere=elsewhere)
    if found:
        raise RecipeError(found)
    if grace_s < MIN_GRACE_S:
        rule = f"torchrun needs {SHUTDOWN_MARGIN_S} s of it to end, and the last step and its checkpoint need the rest"
        raise UsageError(f"--grace {grace_s} is too short: {rule}", remedy=f"give at least {MIN_GRACE_S}")


def _command(recipe: str, settings: Sequence[str]) -> list[str]:
    return ["train", recipe, *(word for each in settings for word in ("--set", each))]


def _torchrun_limits(grace_s: int) -> str:
    return f"--max-restarts {MAX_RESTARTS} --shutdown-timeout {grace_s - SHUTDOWN_MARGIN_S}"


def dns_label(name: str) -> str:
    """Return the name as a DNS label, short enough that ``-INDEX`` fits into 63 characters."""
    label = re.sub(r"[^a-z0-9-]+", "-", name.lower()).strip("-")[:50].strip("-")
    return label if label and label[0].isalpha() else f"run-{label}".strip("-")
