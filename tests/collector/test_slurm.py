"""Slurm jobs without a cluster: binade.toml, the script that --dry-run shows, and what is refused.

tests/slurm submits jobs to a real one.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from binade.collector.cli.jobs import add_line
from binade.collector.cli.options import parse
from binade.collector.jobs import directory, queue, runner, slurm, view_of
from binade.collector.training.config import RunConfig
from binade.collector.training.slurm_options import SlurmOptions
from binade.collector.training.targets import CONFIG
from binade.data.run.json_files import read_json, write_json
from tests.conftest import PROJECT

pytestmark = pytest.mark.slow

SLURM = ("run", "--launcher", "slurm", "--tp", "2")
# What a shell would obey, and what Slurm's own quoting could trip over.
HOSTILE = """a b; touch x $(touch y) `touch z` 'q' "d" & #"""


def executable(directory: Path, name: str, program: str) -> None:
    path = directory / name
    path.write_text(f"#!{sys.executable}\n{program}")
    path.chmod(0o755)


def dry_script(command, capsys, *arguments: str) -> str:
    assert command(*arguments, "--dry-run") == 0
    text = capsys.readouterr().out
    return text[text.index("#!/bin/bash") :]


def settings_of(script: str) -> dict[str, str]:
    return dict(re.findall("^#SBATCH --([a-z-]+)=(.*)$", script, re.M))


def runs_of(script: str) -> list[str]:
    """The directories of the runs, read as the shell reads them."""
    (line,) = [line for line in script.splitlines() if line.startswith("runs=(")]
    return shlex.split(line.removeprefix("runs=(").removesuffix(")"))


def task_of(script: str) -> list[str]:
    """The command of one task, read as the shell reads it."""
    (line,) = [line for line in script.splitlines() if line.startswith("exec srun ")]
    words = shlex.split(line)
    return words[words.index(sys.executable) :]


# The script


def test_the_script_asks_for_what_was_asked(command, capsys, tmp_path: Path):
    script = dry_script(
        command, capsys, *SLURM, "--dp", "4", "--nodes", "2", "--ranks-per-node", "4", "--partition", "gpu,big",
        "--account", "lab-7", "--time", "1-12:30", "--gpus-per-node", "4", "--device", "cuda",
    )  # fmt: skip
    assert settings_of(script) == {
        "nodes": "2", "ntasks-per-node": "4", "gpus-per-node": "4", "partition": "gpu,big", "account": "lab-7",
        "time": "1-12:30", "job-name": "binade", "signal": "USR1@90", "array": "0-0", "chdir": os.getcwd(),
        "output": f"{runs_of(script)[0]}/batch_%a.txt",
    }  # fmt: skip
    assert [Path(run).parent for run in runs_of(script)] == [tmp_path / "runs"]
    task = [sys.executable, "-u", "-m", "binade", "slurm-rank", "$run"]
    assert task_of(script) == task and not (tmp_path / "runs").exists()
    assert set(settings_of(dry_script(command, capsys, *SLURM))) == {
        "nodes", "ntasks-per-node", "job-name", "signal", "array", "chdir", "output",
    }  # fmt: skip


TARGETS = """
[targets.gpu]
launcher = "slurm"
partition = "a100"
at_once = 3
options = ["--qos=high"]
setup = ["module load cuda/12"]
[targets.image]
launcher = "slurm"
python = "python3"
container = "docker://lab/torch:2.11"
container_options = ["--container-mounts=/data:/data"]
[targets.sif]
launcher = "slurm"
container = "/images/torch.sif"
container_runtime = "apptainer"
container_options = ["--nv", "--bind", "/data"]
"""


def test_a_target_gives_what_the_command_does_not(command, capsys, tmp_path: Path, monkeypatch):
    monkeypatch.setenv(CONFIG, str(tmp_path / "binade.toml"))
    (tmp_path / "binade.toml").write_text(TARGETS)
    script = dry_script(command, capsys, "batch", "--target", "gpu", "--quantization", "bf16,mxfp8", "--time", "30")
    found = settings_of(script)
    assert (found["partition"], found["time"], found["array"], found["qos"]) == ("a100", "30", "0-1%3", "high")
    assert "\nmodule load cuda/12\n" in script and "BINADE_TARGET=gpu\n" in script
    script = dry_script(command, capsys, "run", "--target", "gpu", "--partition", "other", "--at-once", "1")
    assert (settings_of(script)["partition"], settings_of(script)["array"]) == ("other", "0-0%1")
    line = dry_script(command, capsys, "run", "--target", "image").splitlines()[-2]
    assert "--container-image=docker://lab/torch:2.11 --container-mounts=/data:/data python3 -u -m" in line
    line = dry_script(command, capsys, "run", "--target", "sif").splitlines()[-2]
    assert f"apptainer exec --nv --bind /data /images/torch.sif {sys.executable} -u -m" in line


def job_of(config: RunConfig, start: SlurmOptions = directory.HERE) -> directory.Job:
    return directory.Job("a_run", "/", "2026-01-01", config=config, start=start)


def test_a_job_keeps_how_it_starts(tmp_path: Path):
    start = SlurmOptions(target="gpu", partition="a100", time="1:30:00", nodes=2)
    write_json(tmp_path / "job.json", job_of(RunConfig(tp=2), start))
    job = read_json(directory.Job, tmp_path / "job.json")
    assert (job.config, job.start) == (RunConfig(tp=2), start) and job.on_cluster
    request = parse(job.arguments)
    assert (request.runs, request.start) == ([job.config], start)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[targets.a]\nlauncher = 'pbs'", "targets.a.launcher is \"pbs\": Input should be 'slurm'"),
        ("[targets.a]\npartitoin = 'x'", 'targets.a.partitoin is "x": Unexpected keyword argument'),
        ('[targets.a]\nsetup = ["a\\nb"]', "targets.a.setup has 'a\\nb': write one line"),
        ("[targets.a]\noptions = ['qos']", "targets.a.options has 'qos': write sbatch options"),
        ("[targets.a", "Expected ']'"),
        ("[targets.b]\nnodes = 1", "there is no target 'a': "),
        ("[targets.a]\npartition = 'a b'", "target a: --partition 'a b' is not valid"),
    ],
)
def test_a_file_that_is_wrong_is_one_line(command, capsys, tmp_path: Path, monkeypatch, text: str, message: str):
    monkeypatch.setenv(CONFIG, str(tmp_path / "binade.toml"))
    (tmp_path / "binade.toml").write_text(text)
    assert command("run", "--target", "a", "--dry-run") == 2
    err = capsys.readouterr().err
    assert err.startswith("binade: ") and message in err and err.count("\n") == 1


def test_a_target_is_named_for_the_machines_that_it_chose(command, capsys, tmp_path: Path, monkeypatch):
    monkeypatch.setenv(CONFIG, str(tmp_path / "binade.toml"))
    (tmp_path / "binade.toml").write_text("[targets.a]\nnodes = 2\nranks_per_node = 4")
    assert command("run", "--target", "a", "--dry-run") == 2
    assert capsys.readouterr().err.startswith("binade: with target a, --tp 1 times --dp 1 is 1 ranks, --nodes 2 times")


@pytest.mark.parametrize(
    ("options", "nodes", "tasks"),
    [
        (("--tp", "2", "--dp", "2"), "1", "4"),
        (("--tp", "2", "--dp", "2", "--nodes", "2"), "2", "2"),
        (("--tp", "2", "--dp", "2", "--ranks-per-node", "1"), "4", "1"),
        (("--dp", "6", "--nodes", "3", "--ranks-per-node", "2"), "3", "2"),
        ((), "1", "1"),
    ],
)
def test_ranks_are_divided_among_the_nodes(command, capsys, options, nodes: str, tasks: str):
    script = dry_script(command, capsys, "run", "--launcher", "slurm", *options)
    asked = settings_of(script)
    assert (asked["nodes"], asked["ntasks-per-node"]) == (nodes, tasks)


def test_what_a_user_wrote_is_quoted(command, capsys, tmp_path: Path):
    """bash itself reads the script, with a srun that prints what it is given."""
    root = tmp_path / HOSTILE
    script = dry_script(command, capsys, *SLURM, "--tensor-save-dir", str(root))
    (run,) = runs_of(script)
    Path(run).mkdir(parents=True)
    executable(tmp_path, "srun", "import os, sys; print(*sys.argv[1:], os.environ['TENSOR_SAVE_DIR'], sep='\\0')")
    environment = os.environ | {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "SLURM_ARRAY_TASK_ID": "0"}
    done = subprocess.run(["bash"], input=script, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout + done.stderr == ""
    assert (Path(run) / "output.txt").read_text().rstrip("\n").split("\0")[-2:] == [run, str(root)]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["srun", HOSTILE])


TOLD = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "GLOO_SOCKET_IFNAME", "MASTER_PORT")


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("slurm", "told"),
    [
        (("node[07-09]", "3", "6", "3", "1", "1"), ["3", "6", "1", "2", "node07", "None"]),
        (("alone", "1", "2", "1", "0", "1"), ["1", "2", "1", "2", "alone", "lo"]),
        (("rack[2,4-5]n[07-09,11],x", "2", "2", "1", "1", "0"), ["1", "2", "0", "1", "rack2n07", "None"]),
        (("a,b[1-2]", "2", "2", "1", "1", "0"), ["1", "2", "0", "1", "a", "None"]),
    ],
    ids=["three nodes", "one node", "racks", "names"],
)
def test_a_task_learns_its_place(tmp_path: Path, slurm: tuple[str, ...], told: list[str]):
    """By the variables that srun sets, whatever was set where the job was submitted. In place of the command a function
    prints what it would see."""
    program = (
        "import os; from binade.collector.cli import slurm_rank as rank\n"
        f"rank.collect = lambda plans, root: print(*(os.environ.get(name) for name in {TOLD}))\n"
        f"rank.slurm_rank.main([{str(tmp_path)!r}], standalone_mode=False)"
    )
    write_json(tmp_path / "job.json", job_of(RunConfig()))
    names = (
        "SLURM_JOB_NODELIST",
        "SLURM_JOB_NUM_NODES",
        "SLURM_NTASKS",
        "SLURM_PROCID",
        "SLURM_NODEID",
        "SLURM_LOCALID",
    )
    environment = {name: value for name, value in os.environ.items() if name not in TOLD}
    environment |= {"SLURM_JOB_ID": "77", "RANK": "9", "WORLD_SIZE": "9"} | dict(zip(names, slurm, strict=True))
    done = subprocess.run([sys.executable, "-c", program], cwd=PROJECT, env=environment, capture_output=True, text=True)
    *got, port = done.stdout.split()
    assert got == told and 20000 <= int(port) <= 60000, done.stderr


# What Slurm says of jobs


def test_jobs_that_squeue_has_forgotten_are_looked_up_in_sacct(tmp_path: Path, monkeypatch):
    """Stand-ins: accounting needs a database, which the cluster of tests/slurm has not."""
    monkeypatch.setenv("PATH", str(tmp_path))
    forgotten = [slurm.ClusterJob(f"7_{number}", "RUNNING") for number in range(3)]
    executable(tmp_path, "squeue", "import sys; sys.exit('slurm_load_jobs error: Invalid job id specified')")
    executable(tmp_path, "sacct", "print('7_0|COMPLETED', '7_1|CANCELLED by 1000', '7_9|FAILED', sep='\\n')")
    found = slurm.poll(forgotten)
    assert [found[job.id].state for job in forgotten] == ["COMPLETED", "CANCELLED", slurm.UNKNOWN]
    executable(tmp_path, "sacct", "import sys; sys.exit('Slurm accounting storage is disabled')")
    assert {job.state for job in slurm.poll(forgotten).values()} == {slurm.UNKNOWN}
    executable(tmp_path, "sacct", "import sys; sys.exit('sacct: error: Unable to connect to slurmdbd')")
    assert slurm.poll(forgotten) == {}
    executable(tmp_path, "squeue", "print('7_0|RUNNING|gpu|a|b')")
    assert slurm.poll(forgotten) == {"7_0": slurm.ClusterJob("7_0", "RUNNING", "a|b", "gpu")}
    (tmp_path / "sacct").unlink()
    assert [job.state for job in slurm.poll(forgotten).values()] == ["RUNNING", slurm.UNKNOWN, slurm.UNKNOWN]
    executable(tmp_path, "squeue", "import sys; sys.exit('slurm_load_jobs error: Unable to contact slurm controller')")
    assert slurm.poll(forgotten) == {}  # nothing is known, and nothing has ended


def test_a_cluster_that_names_no_job(command, capsys, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    executable(tmp_path, "sbatch", "print('queued')")
    assert command(*SLURM) == 1
    assert capsys.readouterr() == ("", "binade: sbatch printed no job ID: its output is 'queued'\n")
    assert queue.read_jobs(tmp_path / "runs") == []


def test_a_submission_that_was_interrupted(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    executable(tmp_path, "sbatch", "print(7)")
    (job,) = add_line(tmp_path / "runs", SLURM)
    directory.drop_launch(tmp_path / "runs", job)
    assert view_of(tmp_path / "runs", job).state == "queued"
    runner.Runner(tmp_path / "runs").turn()
    view = view_of(tmp_path / "runs", job)
    assert (view.state, view.reason) == ("failed", "its submission was interrupted: retry the job")


def test_a_job_that_cannot_be_followed_is_reported_and_the_others_go_on(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    executable(tmp_path, "sbatch", "print(7)")
    executable(tmp_path, "squeue", "print('7_0|RUNNING|gpu|a', '7_1|RUNNING|gpu|a', sep='\\n')")
    root = tmp_path / "runs"
    damaged, sound = add_line(root, ["batch", "--launcher", "slurm", "--quantization", "bf16,mxfp8"])
    change = runner.change_launch

    def refused(where, job, **changes):
        if job.id == damaged.id:
            raise directory.JobError("its file is damaged")
        change(where, job, **changes)

    monkeypatch.setattr(runner, "change_launch", refused)
    runner.Runner(root).turn()
    assert f"{damaged.run_id}: its file is damaged" in capsys.readouterr().out
    assert directory.read_launch(root, sound).cluster.state == "RUNNING"


def test_a_hanging_cluster_is_given_up_on(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(slurm, "PATIENCE", 0.5)
    executable(tmp_path, "squeue", "import time; time.sleep(60)")
    assert slurm.poll([slurm.ClusterJob("7_0")]) == {}
    executable(tmp_path, "sbatch", "import time; time.sleep(1); print(7)")
    assert slurm.submit("", tmp_path / "script") == "7"


# What is refused


@pytest.mark.sampled(93)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--nodes", "2"), "--nodes needs --target or --launcher slurm: add one, or leave --nodes out"),
        (("--ranks-per-node", "1"), "--ranks-per-node needs --target or --launcher slurm"),
        (("--gpus-per-node", "1"), "--gpus-per-node needs --target or --launcher slurm"),
        (("--launcher", "local", "--partition", "a"), "--partition needs --target or --launcher slurm"),
        (("--account", "a"), "--account needs --target or --launcher slurm"),
        (("--time", "1"), "--time needs --target or --launcher slurm"),
        (("--launcher", "pbs"), "--launcher 'pbs': expected one of local, slurm"),
        ((*SLURM[1:], "--nodes", "0"), "--nodes is 0: it must be 1 or more"),
        ((*SLURM[1:], "--ranks-per-node", "-1"), "--ranks-per-node is -1: it must be 1 or more"),
        ((*SLURM[1:], "--gpus-per-node", "0"), "--gpus-per-node is 0: it must be 1 or more"),
        ((*SLURM[1:], "--nodes", "x"), "invalid value for '--nodes': 'x' is not a valid integer"),
        ((*SLURM[1:], "--nodes", "3"), "--tp 2 times --dp 1 is 2 ranks, not a multiple of --nodes 3"),
        ((*SLURM[1:], "--ranks-per-node", "3"), "--tp 2 times --dp 1 is 2 ranks, not a multiple of --ranks-per-node 3"),
        (
            (*SLURM[1:], "--nodes", "2", "--ranks-per-node", "2"),
            "--tp 2 times --dp 1 is 2 ranks, --nodes 2 times --ranks-per-node 2 is 4: make them equal",
        ),
        (
            (*SLURM[1:], "--device", "cuda", "--gpus-per-node", "1"),
            "--gpus-per-node is 1, but a node has 2 ranks and each takes a GPU",
        ),
        ((*SLURM[1:], "--time", "soon"), "--time 'soon' is not valid: write 90 (minutes), 1:30:00 or 2-12:00"),
        ((*SLURM[1:], "--time", "1\n2"), "--time '1\\n2' is not valid"),
        ((*SLURM[1:], "--time", ""), "--time '' is not valid"),
        ((*SLURM[1:], "--partition", "a b"), "--partition 'a b' is not valid"),
        ((*SLURM[1:], "--partition", "a\ntouch x"), "--partition 'a\\ntouch x' is not valid"),
        ((*SLURM[1:], "--account", ""), "--account '' is not valid"),
        (
            (*SLURM[1:], "--tensor-save-dir", "/tmp/a\ntouch x"),
            "the root '/tmp/a\\ntouch x' has characters that are special",
        ),
        ((*SLURM[1:], "--tensor-save-dir", "/tmp/%j"), "the root '/tmp/%j' has characters that are special to Slurm"),
        ((*SLURM[1:], "--tensor-save-dir", "/tmp/a\\b"), "the root '/tmp/a\\\\b' has characters that are special"),
    ],
)
@pytest.mark.parametrize("has_sbatch", [True, False], ids=["sbatch", "no sbatch"])
@pytest.mark.parametrize("dry", [(), ("--dry-run",)], ids=["submit", "dry run"])
def test_bad_input_is_one_line(
    command, capsys, tmp_path: Path, monkeypatch, options, message: str, dry, has_sbatch: bool
):
    (programs := tmp_path / "programs").mkdir()
    monkeypatch.setenv("PATH", str(programs))
    if has_sbatch:
        executable(programs, "sbatch", "raise SystemExit('it was called')")
    assert command("run", *options, *dry) == 2
    out, err = capsys.readouterr()
    assert err.startswith(f"binade: {message}") and err.count("\n") == 1 and out == ""
    assert list(tmp_path.iterdir()) == [programs] and not (
        "--tensor-save-dir" in options and Path(options[-1]).exists()
    )


def test_without_sbatch(command, capsys, monkeypatch, tmp_path: Path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert command(*SLURM) == 2
    err = capsys.readouterr().err
    assert err.startswith("binade: a Slurm job is submitted with sbatch, which is not on this machine")
    assert err.count("\n") == 1 and not (tmp_path / "runs").exists()
    assert dry_script(command, capsys, *SLURM).startswith("#!/bin/bash")


def test_a_rank_outside_a_job():
    done = subprocess.run(
        [sys.executable, "-m", "binade", "slurm-rank", "run"],
        cwd=PROJECT, capture_output=True, text=True,
        env={name: value for name, value in os.environ.items() if not name.startswith("SLURM_")},
    )  # fmt: skip
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("binade: slurm-rank is for tasks of srun")
