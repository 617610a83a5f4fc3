"""Job files: the sbatch script is run with stand-ins for Slurm's programs, the manifest is held against the API."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from typer.testing import CliRunner

from tests.forked import COMMAND_LINE, Forked
from tests.training.ranked import MODULE, train
from trainwright.cli import app

RECIPE = """
until: 24steps
device: cpu
model: {use: mlp, args: {sizes: [8, 16, 3]}}
data: {train: "slow:Slow"}
batch: {size: 8}
precision: fp32
checkpoint: {every: 2steps}
parallel: auto
log: {every: 1steps, doctor: false}
"""
KILLED_ONCE = """
import os
from pathlib import Path

class Killed(Slow):
    def __getitem__(self, index):
        if (os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]) == ("1", "0"):
            log = Path("runs/run/log.jsonl")
            if log.exists() and log.read_bytes().count(b'"kind":"step"') in range(5, 9):
                os.kill(os.getpid(), 9)
        return super().__getitem__(index)
"""
KILLED_BY_RAY = """
import os
from pathlib import Path

class Killed(Slow):
    def __getitem__(self, index):
        log, killed = Path("runs/run/log.jsonl"), Path("killed")
        if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1 and not killed.exists() and log.exists():
            if log.read_bytes().count(b'"kind":"step"') in range(5, 9):
                killed.touch()
                os.kill(os.getpid(), 9)
        return super().__getitem__(index)
"""
STAND_INS = {
    "srun": """
while [[ $1 == --* ]]; do shift; done
"$@" &
task=$!
trap 'kill -USR1 $task' USR1
code=138
while [ $code -eq 138 ]; do wait $task; code=$?; done
exit $code
""",
    "scontrol": '[ "$1" = show ] && echo 127.0.0.1 || echo "$*" >> requeued.txt',
}
"""Slurm's programs as far as the script uses them: srun starts the task of a node, which is this machine."""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "slow.py").write_text(MODULE.replace("sleep(0.005)", "sleep(0.01)"))  # few steps, and time for a signal
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    return tmp_path


def launched(*words: str) -> str:
    done = CliRunner().invoke(app, ["launch", *words])
    assert done.exit_code == 0, done.output
    return done.output


def submit(project: Path) -> subprocess.Popen[str]:
    """Runs the script as slurmd would on the first node of job 417."""
    programs = project / "bin"
    programs.mkdir(exist_ok=True)
    for name, code in STAND_INS.items():
        (programs / name).write_text(f"#!/bin/bash\n{code}")
        (programs / name).chmod(0o755)
    path = f"{programs}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "SLURM_JOB_ID": "417", "SLURM_JOB_NODELIST": "node[1-2]"}
    command = ["bash", str(project / "job.sbatch")]
    return subprocess.Popen(command, cwd=project, env=environment, stderr=subprocess.PIPE, text=True)


def records(project: Path, kind: str) -> list[dict[str, Any]]:
    log = project / "runs/run/log.jsonl"
    whole = log.read_text().split("\n")[:-1] if log.exists() else []  # a line may be half written
    return [record for record in map(json.loads, whole) if record["kind"] == kind]


@pytest.mark.process
@pytest.mark.slow
def test_a_slurm_job_survives_a_kill_and_saves_before_its_end_is_queued_again_and_goes_on(project: Path) -> None:
    """torchrun starts the ranks again when one was killed; the run ends with the bits of one that nobody disturbed."""
    undisturbed = train(project, "undisturbed")
    assert [each.wait() for each in undisturbed] == [0, 0], undisturbed[0].stderr
    with (project / "slow.py").open("a") as module:
        module.write(KILLED_ONCE)
    words = [str(project / "recipe.yaml"), "--ranks", "1x2", "--time", "00:10:00", "--partition", "cpu"]
    words += ["--set", "data.train=slow:Killed"]
    printed = launched("slurm", *words, "--output", str(project / "job.sbatch"))
    assert f"sbatch {project / 'job.sbatch'}" in printed
    assert subprocess.run(["bash", "-n", str(project / "job.sbatch")], check=False).returncode == 0
    job = submit(project)
    end_s = time.monotonic() + 200
    while len(records(project, "started")) < 2 or records(project, "step")[-1]["step"] < 10:
        assert time.monotonic() < end_s and job.poll() is None, job.communicate()[1]
        time.sleep(0.02)
    job.send_signal(signal.SIGUSR1)  # what --signal=B:USR1@... does
    stderr = job.communicate(timeout=120)[1]
    assert job.returncode == 75, stderr
    assert (project / "requeued.txt").read_text() == "requeue 417\n"
    stopped = records(project, "ended")[-1]
    assert (stopped["ending"], stopped["reason"]) == ("stopped", "SIGUSR1") and stopped["step"] < 24
    again = submit(project)
    stderr = again.communicate(timeout=200)[1]
    assert again.returncode == 0, stderr
    ended = records(project, "ended")[-1]
    assert (ended["ending"], ended["step"]) == ("finished", 24)
    begun = [each["step"] for each in records(project, "started")]
    assert begun[0] == 0 < begun[1] < 10 <= begun[2] == stopped["step"] and len(begun) == 3
    assert [path.name for path in (project / "runs").iterdir()] == ["run"]
    mine, theirs = (project / name / "run/checkpoints/step-00000024" for name in ("runs", "undisturbed"))
    assert (mine / "model.safetensors").read_bytes() == (theirs / "model.safetensors").read_bytes()
    plan = json.loads((project / "runs/run/plan.json").read_text())
    assert plan["settled"]["layout"] == {"replicate": 2, "shard": 1, "tensor": 1, "pipeline": 1, "context": 1}
    assert plan["batch"] == {"size": 8, "micro": 4, "accumulation": 1, "ranks": 2}
    assert (project / "requeued.txt").read_text() == "requeue 417\n"


@pytest.mark.process
@pytest.mark.slow
def test_torchrun_ends_with_the_code_of_the_ranks(project: Path) -> None:
    """A recipe that only a rank can refuse: 2, where torchrun says 1."""
    recipe = project / "recipe.yaml"
    recipe.write_text(RECIPE.replace("sizes: [8, 16, 3]", "sizes: [8, 16, 3], depth: 2"))
    words = ["--nproc-per-node", "1", "-m", "trainwright", "train", str(recipe)]
    done = Forked("from trainwright.cli.torchrun import main; main()", *words, cwd=project)
    assert done.wait() == 2, done.stderr
    assert "depth" in done.stderr


@pytest.mark.process
@pytest.mark.slow
def test_a_killed_rank_is_reported_with_a_remedy(project: Path) -> None:
    (project / "deadly.py").write_text("import os\n\ndef kill(outputs, targets):\n    os.kill(os.getpid(), 9)\n")
    words = ["train", "recipe.yaml", "--set", "loss=deadly:kill", "--", "--nproc-per-node", "1"]
    done = Forked(COMMAND_LINE, *words, cwd=project)
    assert done.wait() == 1 and "error: rank 0 was ended by SIGKILL" in done.stderr, done.stderr
    assert "trainwright resume RUN" in done.stderr


@pytest.mark.process
@pytest.mark.slow
def test_ranks_whose_torchrun_is_killed_save_and_stop(project: Path) -> None:
    """They would go on, and the torchrun that a scheduler starts next could not continue their run."""
    words = ["train", "recipe.yaml", "--set", "until=1000steps", "--", "--nproc-per-node", "2"]
    torchrun = Forked(COMMAND_LINE, *words, cwd=project)
    end_s = time.monotonic() + 100
    while len(records(project, "step")) < 3:
        assert time.monotonic() < end_s and torchrun.poll() is None, torchrun.stderr
        time.sleep(0.02)
    torchrun.kill()
    while not (ended := records(project, "ended")):
        assert time.monotonic() < end_s
        time.sleep(0.02)
    assert (ended[0]["ending"], ended[0]["reason"]) == ("stopped", "SIGTERM"), (ended[0], torchrun.stderr)
    assert (project / f"runs/run/checkpoints/step-{ended[0]['step']:08d}").exists()


ORPHAN = """
import multiprocessing, os, signal, threading, time
from trainwright.cli import torchrun

def sleep():
    torchrun.ORPHAN_GRACE_S = 0.1
    threading.Thread(target=torchrun._stop_after_parent, daemon=True).start()
    signal.signal(signal.SIGTERM, lambda *_: open("asked", "w").close())  # as one that waits for another rank
    open("rank", "w").write(str(os.getpid()))
    while True:
        time.sleep(1)

multiprocessing.get_context("fork").Process(target=sleep).start()
while not os.path.exists("asked"):
    if os.path.exists("rank"):
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.01)
"""


@pytest.mark.process
def test_a_rank_that_cannot_stop_is_killed_after_its_torchrun(tmp_path: Path) -> None:
    assert Forked(ORPHAN, cwd=tmp_path).wait() == -signal.SIGKILL
    end_s = time.monotonic() + 20
    pid = int((tmp_path / "rank").read_text())
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < end_s
        time.sleep(0.01)
    assert (tmp_path / "asked").exists()


@pytest.mark.slow
def test_the_header_of_a_slurm_job(project: Path) -> None:
    recipe = str(project / "recipe.yaml")
    words = ["--ranks", "4x8", "--account", "physics", "--sbatch", "signal=B:USR1@600", "--set", "device=auto"]
    script = launched("slurm", recipe, *words)
    header = {line.removeprefix("#SBATCH --") for line in script.splitlines() if line.startswith("#SBATCH")}
    assert {"nodes=4", "ntasks-per-node=1", "gpus-per-node=8", "requeue", "account=physics"} <= header
    for limit in ("2:01", "0-0:2:1", "UNLIMITED"):
        assert f"#SBATCH --time={limit}\n" in launched("slurm", recipe, "--time", limit)
    assert "signal=B:USR1@600" in header and not any("USR1@120" in each for each in header)
    assert "gpus-per-node" not in launched("slurm", recipe, "--ranks", "4x8")  # device: cpu


def test_what_user_code_prints_is_not_in_the_job_file(project: Path) -> None:
    (project / "printing.py").write_text(f"print('reading samples')\n{MODULE}")
    words = ["launch", "slurm", str(project / "recipe.yaml"), "--set", "data.train=printing:Slow"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0 and done.stdout.startswith("#!/bin/bash\n") and "reading samples" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("cores", "seen"), [({"SLURM_CPUS_PER_TASK": "16"}, "16"), ({}, "")], ids=["16", "default"])
def test_srun_has_the_cores_that_sbatch_was_given(project: Path, cores: dict[str, str], seen: str) -> None:
    script = launched("slurm", str(project / "recipe.yaml"), "--sbatch", "cpus-per-task=16")
    [line] = [line for line in script.splitlines() if "SRUN_CPUS_PER_TASK" in line]
    command = ["bash", "-c", f"{line}\nprintenv SRUN_CPUS_PER_TASK"]
    environment = {"PATH": os.environ["PATH"], **cores}
    done = subprocess.run(command, env=environment, text=True, capture_output=True, check=False)
    assert done.stdout.strip() == seen and "#SBATCH --cpus-per-task=16\n" in script


@pytest.mark.parametrize(
    ("words", "code", "error"),
    [
        (["--ranks", "two"], 2, "is not a number of ranks"),
        (["--ranks", "2x4", "--set", "parallel.replicate=3"], 2, "must be the number of ranks, 8"),
        (["--ranks", "2x4", "--grace", "20"], 2, "too short"),
        (["--ranks", "2x4", "--sbatch", "rm -rf"], 2, "not options of sbatch"),
        (["--ranks", "2x4", "--sbatch", "ntasks-per-node=4"], 2, "--ranks sets ntasks-per-node"),
        (["--ranks", "2x4", "--time", "12h"], 2, "is not a time limit of Slurm"),
        (["--ranks", "2x4", "--time", "1:2:3:4"], 2, "is not a time limit of Slurm"),
        (["--ranks", "2x4", "--time", "00:02:00"], 2, "is not longer than the 120 s"),
        (["--ranks", "2x4", "--time", "2"], 2, "is not longer than the 120 s"),
        (["--ranks", "2x4", "--output", "no/such/folder"], 1, "cannot be written"),
        (["--ranks", "2x4", "--stack", "cu13"], 2, "did you mean 'cu130'?"),
        (["--ranks", "2x4", "--stack", "cpu", "--set", "device=auto"], 2, "stack cpu is for the CPU"),
    ],
)
def test_what_cannot_work_is_refused(project: Path, words: list[str], code: int, error: str) -> None:
    done = CliRunner().invoke(app, ["launch", "slurm", str(project / "recipe.yaml"), *words])
    assert done.exit_code == code and error in done.stderr and "remedy" in done.stderr


CONTAINER = {
    "name": str,
    "image": str,
    "command": list,
    "env": list,
    "volumeMounts": list,
    "resources": dict,
}
"""Fields of a container in the API (v1) that the manifest may use, with their types."""


def test_a_manifest_keeps_to_the_api(project: Path) -> None:
    recipe = project / "recipe.yaml"
    words = ["--image", "registry/run:1", "--volume", "runs", "--set", "device=auto", "--set", "name=GPT_7b.v2"]
    text = launched("kubernetes", str(recipe), "--ranks", "2x8", *words, "--stack", "cu130")
    config, service, job = yaml.safe_load_all(text)
    assert [each["kind"] for each in (config, service, job)] == ["ConfigMap", "Service", "Job"]
    assert config["data"]["recipe.yaml"] == recipe.read_text()
    assert {each["metadata"]["name"] for each in (config, service, job)} == {"gpt-7b-v2"}
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    [container] = pod["containers"]
    assert set(container) <= set(CONTAINER) and all(isinstance(v, CONTAINER[k]) for k, v in container.items())
    # rules of the API: an indexed job has as many completions; a failure policy needs Never; values rise, none is 0
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 2, 2)
    assert pod["restartPolicy"] == "Never"
    codes = [rule["onExitCodes"] for rule in spec["podFailurePolicy"]["rules"] if "onExitCodes" in rule]
    assert all(
        each["containerName"] == container["name"] and each["values"] == sorted(set(each["values"]) - {0})
        for each in codes
    )
    assert [each["values"] for each in codes] == [[2, 3], [75]]
    # pods find each other: the service selects them, their subdomain is its name, and the first is where they meet
    labels = job["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items() and service["spec"]["clusterIP"] == "None"
    assert pod["subdomain"] == service["metadata"]["name"]
    command = container["command"]
    assert (
        command[command.index("--rdzv-endpoint") + 1] == f"gpt-7b-v2-0.gpt-7b-v2:{service['spec']['ports'][0]['port']}"
    )
    assert {each["name"] for each in container["volumeMounts"]} == {each["name"] for each in pod["volumes"]}
    assert container["resources"] == {"limits": {"nvidia.com/gpu": 8}}
    grace = pod["terminationGracePeriodSeconds"]
    assert int(command[command.index("--shutdown-timeout") + 1]) < grace
    assert command[command.index("--set") + 1] == "device=auto" and "folder=/runs" in command
    # each pod compares its node with the stack before ranks start
    [check] = pod["initContainers"]
    assert check["command"] == ["trainwright", "env", "--stack", "cu130", "--gpus", "8"]
    assert pod["securityContext"]["fsGroup"] == 1000
    assert (check["image"], check["resources"]) == (container["image"], container["resources"])


def test_a_slurm_job_in_an_image_first_compares_the_node_with_the_stack(project: Path) -> None:
    recipe = str(project / "recipe.yaml")
    words = ["--ranks", "2x8", "--set", "device=auto", "--image", "registry#run:1-cu130", "--stack", "cu130"]
    script = launched("slurm", recipe, *words)
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0
    check, train = (line for line in script.splitlines() if line.startswith("srun"))
    container = f"""--container-image='registry#run:1-cu130' --container-mounts="$PWD:$PWD",{project}:{project}"""
    assert container in check and container in train
    assert check.endswith("trainwright env --stack cu130 --gpus 8 || exit 1")
    assert f"trainwright train {recipe}" in train and script.index(check) < script.index(train)
    assert "--gpus" not in launched("slurm", recipe, "--ranks", "2", "--stack", "cpu")  # device: cpu


@pytest.mark.process
@pytest.mark.slow
def test_a_node_that_does_not_fit_the_stack_ends_the_slurm_job_before_training(project: Path) -> None:
    words = [str(project / "recipe.yaml"), "--ranks", "1x1", "--stack", "cu130", "--set", "device=auto"]
    launched("slurm", *words, "--output", str(project / "job.sbatch"))
    job = submit(project)
    stderr = job.communicate(timeout=120)[1]
    assert job.returncode == 1 and not (project / "runs").exists(), stderr


def test_a_task_of_skypilot(project: Path) -> None:
    recipe = project / "recipe.yaml"
    words = ["--ranks", "2x8", "--image", "registry/run:1", "--volume", "runs", "--set", "device=auto"]
    task = yaml.safe_load(launched("skypilot", str(recipe), *words, "--gpu", "H100", "--stack", "cu130"))
    assert (task["num_nodes"], task["resources"]["accelerators"]) == (2, "H100:8")
    assert task["resources"]["image_id"] == "docker:registry/run:1"
    assert task["file_mounts"] == {"/recipe/recipe.yaml": str(recipe)} and task["volumes"] == {"/runs": "runs"}
    assert subprocess.run(["bash", "-n"], input=task["run"], text=True, check=False).returncode == 0
    lines = task["run"].splitlines()
    assert lines[:2] == ["set -e", "trainwright env --stack cu130 --gpus 8"]
    assert lines[3].startswith(
        "trainwright train /recipe/recipe.yaml --set device=auto --set folder=/runs -- --nnodes 2"
    )
    for gpu in ([], ["--gpu", "H100:8"]):
        done = CliRunner().invoke(app, ["launch", "skypilot", str(recipe), *words, *gpu])
        assert done.exit_code == 2 and "give for example --gpu H100" in done.stderr


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
def test_a_program_for_ray_survives_a_kill(project: Path, count: int) -> None:
    """Ray Train starts all workers again when one was killed; the run ends with the bits of one without a kill."""
    pytest.importorskip("ray")
    undisturbed = train(project, "undisturbed", count=count)
    assert [each.wait() for each in undisturbed] == [0] * count, undisturbed[0].stderr
    with (project / "slow.py").open("a") as module:
        module.write(KILLED_BY_RAY)
    words = [str(project / "recipe.yaml"), "--ranks", str(count), "--folder", str(project / "runs")]
    program = project / "train_ray.py"
    launched("ray", *words, "--set", "data.train=slow:Killed", "--output", str(program))
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
    subprocess.run([sys.executable, str(program)], cwd=project, env=environment, check=True, timeout=200)
    begun = [each["step"] for each in records(project, "started")]
    assert len(begun) == 2 and begun[0] == 0 < begun[1] < 10
    assert [path.name for path in (project / "runs").iterdir()] == ["run"]
    launch = json.loads((project / "runs/run/provenance.json").read_text())["launch"]
    assert launch["job"].startswith("ray:ray_train_run")
    mine, theirs = (project / name / "run/checkpoints/step-00000024" for name in ("runs", "undisturbed"))
    assert (mine / "model.safetensors").read_bytes() == (theirs / "model.safetensors").read_bytes()


def test_a_program_for_ray_names_recipe_settings_and_backends(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)
    words = ["recipe.yaml", "--ranks", "2x8", "--set", "device=auto"]
    program = launched("ray", *words, "--folder", "/shared/runs")
    compile(program, "train_ray.py", "exec")
    assert "RECIPE = 'recipe.yaml'\nSETTINGS = ['device=auto', 'folder=/shared/runs']" in program
    assert "backend='cpu:gloo,cuda:nccl'" in program and "num_workers=16, use_gpu=True" in program
    done = CliRunner().invoke(app, ["launch", "ray", *words, "--folder", "runs"])
    assert done.exit_code == 2 and "give for example --folder /runs" in done.stderr
