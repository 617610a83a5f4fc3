"""``launch slurm SWEEP`` and ``launch kubernetes SWEEP``: one job per trial, one journal in a shared folder."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from trainwright.commands.launch import (
    MAX_POD_FAILURES,
    SBATCH_SAVE,
    SBATCH_WAIT,
    SHUTDOWN_MARGIN_S,
    STOPPED_AND_SAVED,
    JobFile,
    dns_label,
    require_grace,
    sbatch_header,
)
from trainwright.commands.sweep.spec import SPEC, Sweep
from trainwright.recipe import load
from trainwright.recipe.yaml_core import write_all

USAGE_ERROR = 2

_SBATCH = """\
#!/bin/bash
# {name}: made by `trainwright launch slurm`. A task of the array is one trial.
{header}

export TRAINWRIGHT_GRACE_S={grace_s}
"""
_SBATCH += (
    SBATCH_SAVE
    + """
{program} --trial "$SLURM_ARRAY_TASK_ID" &
step=$!
"""
)
_SBATCH += SBATCH_WAIT


def slurm_sweep(
    sweep: Sweep,
    arguments: Sequence[str],
    *,
    at_once: int | None = None,
    grace_s: int = 120,
    directives: Sequence[str] = (),
) -> JobFile:
    """Return an sbatch script with an array of jobs. ``arguments`` are those of ``trainwright sweep``.

    Raises UsageError for wrong options and for a budget in USD.
    """
    require_grace(grace_s)
    sweep.require_no_price()
    limit = f"%{at_once}" if at_once else ""
    own = {
        "job-name": f"job-name={sweep.name}",
        "array": f"array=0-{sweep.trials - 1}{limit}",
        "ntasks": "ntasks=1",
        "cpus-per-task": f"cpus-per-task={sweep.threads}",
        **({"gpus-per-task": "gpus-per-task=1"} if _device(sweep) != "cpu" else {}),
        "signal": f"signal=B:USR1@{grace_s}",
        "requeue": "requeue",
        "open-mode": "open-mode=append",
    }
    program = [sys.executable, "-m", "trainwright", "sweep", *arguments]
    text = _SBATCH.format(
        name=sweep.name,
        header=sbatch_header(own, directives),
        grace_s=grace_s - SHUTDOWN_MARGIN_S,
        program=shlex.join(program),
        stopped=STOPPED_AND_SAVED,
    )
    return JobFile(text, "sbatch")


def kubernetes_sweep(
    sweep: Sweep, *, image: str, volume: str, at_once: int | None = None, grace_s: int = 120
) -> JobFile:
    """Return a manifest: sweep and recipe as a ConfigMap, and an indexed Job whose pods are the trials.

    ``volume`` is the name of the PersistentVolumeClaim for the folder of the sweep. Raises UsageError for a short grace
    period and for a budget in USD.
    """
    require_grace(grace_s)
    sweep.require_no_price()
    name = dns_label(sweep.name)
    inside = replace(sweep, recipe=Path("recipe.yaml"), folder=Path("/runs") / sweep.folder.name)
    container: dict[str, object] = {
        "name": "trainwright",
        "image": image,
        "command": ["trainwright", "sweep", f"/sweep/{SPEC}", "--trial", "$(JOB_COMPLETION_INDEX)"],
        "env": [{"name": "TRAINWRIGHT_GRACE_S", "value": str(grace_s - SHUTDOWN_MARGIN_S)}],
        "volumeMounts": [
            {"name": "runs", "mountPath": "/runs"},
            {"name": "sweep", "mountPath": "/sweep", "readOnly": True},
            {"name": "shared-memory", "mountPath": "/dev/shm"},
        ],
    }
    if _device(sweep) != "cpu":
        container["resources"] = {"limits": {"nvidia.com/gpu": 1}}
    documents = [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": name},
            "data": {SPEC: inside.to_yaml(), "recipe.yaml": sweep.recipe.read_text("utf-8")},
        },
        {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": name, "labels": {"trainwright/sweep": name}},
            "spec": {
                "completionMode": "Indexed",
                "completions": sweep.trials,
                "parallelism": min(at_once or sweep.trials, sweep.trials),
                "backoffLimitPerIndex": MAX_POD_FAILURES,
                "podFailurePolicy": {  # Ignore: a new pod, which does not count as a failure
                    "rules": [
                        {"action": "FailJob", "onExitCodes": _ends_with(USAGE_ERROR)},
                        {"action": "Ignore", "onExitCodes": _ends_with(STOPPED_AND_SAVED)},
                        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                    ]
                },
                "template": {
                    "metadata": {"labels": {"trainwright/sweep": name}},
                    "spec": {
                        "restartPolicy": "Never",
                        "terminationGracePeriodSeconds": grace_s,
                        "containers": [container],
                        "volumes": [
                            {"name": "runs", "persistentVolumeClaim": {"claimName": volume}},
                            {"name": "sweep", "configMap": {"name": name}},
                            {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
                        ],
                    },
                },
            },
        },
    ]
    head = f"# {name}: made by `trainwright launch kubernetes`. A pod is one trial of a sweep.\n"
    return JobFile(head + write_all(documents), "kubectl apply -f")


def _ends_with(code: int) -> dict[str, object]:
    return {"containerName": "trainwright", "operator": "In", "values": [code]}


def _device(sweep: Sweep) -> str:
    return load(sweep.recipe, overrides=sweep.settings, environ={}).recipe.device
