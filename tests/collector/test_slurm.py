"""--launcher slurm: the script, what is refused, and a job run to its end by stand-ins for sbatch and srun.

The stand-ins read the script as Slurm does: sbatch takes nodes and tasks from the #SBATCH lines and gives the script to
bash, srun starts every task with the variables that Slurm sets. Everything between them is ours.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from binade.collector.cli.options import job_arguments
from binade.data.runs import list_runs
from tests.conftest import PROJECT

pytestmark = pytest.mark.slow

SLURM = ("run", "--launcher", "slurm", "--tp", "2")
# What a shell would obey, and what Slurm's own quoting could trip over.
HOSTILE = """a b; touch x $(touch y) `touch z` 'q' "d" & #"""

SBATCH = """
import os, re, subprocess, sys
script = open(sys.argv[1]).read()
asked = dict(re.findall("^#SBATCH --([a-z-]+)=(.*)$", script, re.M))
nodes, tasks = int(asked["nodes"]), int(asked["ntasks-per-node"])
given = {"SLURM_JOB_ID": 4242, "SLURM_JOB_NUM_NODES": nodes, "SLURM_TASKS": nodes * tasks}
given["SLURM_JOB_NODELIST"] = "localhost,other" if nodes == 2 else "localhost"
job = subprocess.run(["bash", "-s"], input=script, text=True, env=os.environ | {k: str(v) for k, v in given.items()})
open(os.environ["JOB_ENDED"], "w").write(str(job.returncode))
print("Submitted batch job 4242")
"""
SRUN = """
import argparse, os, subprocess, sys
parser = argparse.ArgumentParser(allow_abbrev=False)
parser.add_argument("--unbuffered", action="store_true", required=True)
parser.add_argument("--output", required=True)
parser.add_argument("--error", required=True)
parser.add_argument("--kill-on-bad-exit")
parser.add_argument("--wait")
parser.add_argument("command", nargs=argparse.REMAINDER)
given = parser.parse_args()
size, nodes = int(os.environ["SLURM_TASKS"]), int(os.environ["SLURM_JOB_NUM_NODES"])
tasks = []
for rank in range(size):
    node, local = divmod(rank, size // nodes)
    place = {"SLURM_NTASKS": size, "SLURM_PROCID": rank, "SLURM_NODEID": node, "SLURM_LOCALID": local}
    out, err = (open(n.replace("%j", "4242").replace("%t", str(rank)), "w") for n in (given.output, given.error))
    environment = os.environ | {name: str(value) for name, value in place.items()}
    tasks.append(subprocess.Popen(given.command, env=environment, stdout=out, stderr=err))
try:
    sys.exit(max(task.wait(200) for task in tasks))
finally:
    for task in tasks:
        task.kill()
"""


def executable(directory: Path, name: str, program: str) -> None:
    path = directory / name
    path.write_text(f"#!{sys.executable}\n{program}")
    path.chmod(0o755)


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory on PATH with sbatch and srun; "ended" beside it will hold the job's exit status."""
    where = tmp_path / "bin"
    where.mkdir()
    executable(where, "sbatch", SBATCH)
    executable(where, "srun", SRUN)
    monkeypatch.setenv("PATH", f"{where}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("JOB_ENDED", str(tmp_path / "ended"))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")  # where "two machines" meet here
    return where


def dry_script(command, capsys, *arguments: str) -> str:
    assert command(*arguments, "--dry-run") == 0
    text = capsys.readouterr().out
    return text[text.index("#!/bin/bash") :]


def task_of(script: str) -> list[str]:
    """The command of one task, read as the shell reads it."""
    (line,) = [line for line in script.splitlines() if line.startswith("srun ")]
    words = shlex.split(line)
    return words[words.index(sys.executable) :]


# The script


def test_the_script_asks_for_what_was_asked(command, capsys, tmp_path: Path):
    script = dry_script(
        command, capsys, *SLURM, "--dp", "4", "--nodes", "2", "--ranks-per-node", "4", "--partition", "gpu,big",
        "--account", "lab-7", "--time", "1-12:30", "--gpus-per-node", "4", "--device", "cuda",
    )  # fmt: skip
    asked = dict(re.findall("^#SBATCH --([a-z-]+)=(.*)$", script, re.M))
    folder = tmp_path / "runs" / ".slurm"
    assert asked == {
        "nodes": "2", "ntasks-per-node": "4", "gpus-per-node": "4", "partition": "gpu,big", "account": "lab-7",
        "time": "1-12:30", "job-name": "binade", "signal": "TERM@90", "open-mode": "append",
        "output": f"{folder}/%j_0_log.out", "error": f"{folder}/%j_0_log.err",
    }  # fmt: skip
    assert task_of(script) == [
        *(sys.executable, "-u", "-m", "binade.collector.training.slurm_rank"),
        *("run", "--tp", "2", "--dp", "4", "--device", "cuda"),
    ]
    assert not (tmp_path / "runs").exists()


def test_what_is_not_asked_is_left_to_the_cluster(command, capsys):
    script = dry_script(command, capsys, *SLURM)
    asked = set(re.findall("^#SBATCH --([a-z-]+)=", script, re.M))
    assert asked == {"nodes", "ntasks-per-node", "job-name", "signal", "open-mode", "output", "error"}


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
    asked = dict(re.findall("^#SBATCH --([a-z-]+)=(.*)$", script, re.M))
    assert (asked["nodes"], asked["ntasks-per-node"]) == (nodes, tasks)


@pytest.mark.parametrize(
    ("given", "passed"),
    [
        ("run --launcher slurm --tp 2", "run --tp 2"),
        ("run --nodes=2 --tp=2 --launcher=slurm --time 1:00 --seed 7 --dry-run", "run --tp=2 --seed 7"),
        ("quick mxfp8 --account a --partition b --no-raw", "quick mxfp8 --no-raw"),
        ("quick --gpus-per-node 1 mxfp8 --ranks-per-node 1", "quick mxfp8"),
        ("--mode batch --launcher slurm --quantization bf16,mxfp8 --nodes 1", "--mode batch --quantization bf16,mxfp8"),
    ],
)
def test_a_task_is_given_the_rest_in_its_order(given: str, passed: str):
    assert job_arguments(given.split()) == passed.split()


def test_what_a_user_wrote_is_quoted(command, capsys, tmp_path: Path):
    """bash itself reads the script, with a srun that prints what it is given."""
    root = tmp_path / HOSTILE
    script = dry_script(command, capsys, *SLURM, "--tensor-save-dir", str(root))
    executable(tmp_path, "srun", "import os, sys; print(*sys.argv[1:], os.environ['TENSOR_SAVE_DIR'], sep='\\0')")
    environment = os.environ | {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(["bash"], input=script, cwd=tmp_path, env=environment, capture_output=True, text=True)
    words = done.stdout.rstrip("\n").split("\0")
    assert done.returncode == 0 and done.stderr == ""
    assert words[-3:] == ["--tensor-save-dir", str(root), str(root)]
    assert words[words.index("--output") + 1] == f"{root}/.slurm/%j_%t_log.out"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["srun"]


# A job


def test_a_job_of_two_ranks_finishes(command, capsys, cluster: Path, tmp_path: Path):
    """Two runs, one after the other."""
    root = tmp_path / HOSTILE
    small = ("--layers", "1", "--sequence-length", "32", "--backend", "torch", "--no-raw", "--scores", "")
    asked = ("--launcher", "slurm", "--tp", "2", "--nodes", "2", "--tensor-save-dir", str(root))
    batch = ("batch", "--quantization", "bf16,mxfp8", *small, *asked)
    assert command(*batch) == 0
    out, err = capsys.readouterr()
    folder = root / ".slurm"
    said = [(folder / f"4242_{rank}_log.err").read_text() for rank in range(2)]
    assert (tmp_path / "ended").read_text() == "0", said
    assert err == "" and out.splitlines() == [
        "job 4242 submitted: nodes 2, ranks on each 1",
        f"    script {folder}/4242_submission.sh",
        f"    log    {folder}/4242_0_log.out, errors in {folder}/4242_0_log.err",
    ]
    runs, refused = list_runs(root)
    assert [run.config["recipe"] for run in runs] == ["bf16", "mxfp8"] and not refused
    for run in runs:
        assert run.status.state == "done" and run.status.tensors > 0
        assert {name[:6] for name in run.segments} == {"rank00", "rank01"}
        assert run.config["tp"] == 2 and "slurm" not in run.config["command"]
    assert "iteration 0 (bf16): loss" in (folder / "4242_0_log.out").read_text()
    assert (folder / "4242_1_log.out").read_text() == ""
    assert dry_script(command, capsys, *batch) == f"{(folder / '4242_submission.sh').read_text()}\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["bin", "ended", HOSTILE])
    assert not [path for path in PROJECT.iterdir() if path.name in "xyz"]


TOLD = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "GLOO_SOCKET_IFNAME", "MASTER_PORT")


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
def test_a_task_learns_its_place(slurm: tuple[str, ...], told: list[str]):
    """By the variables that srun sets, whatever was set where the job was submitted. In place of the command a function
    prints what it would see."""
    program = (
        "import os; from binade.collector.training import slurm_rank as rank\n"
        f"rank.main = lambda argv: print(*(os.environ.get(name) for name in {TOLD}))\n"
        "rank.run_rank([])"
    )
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


# What is refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--nodes", "2"), "--nodes needs --launcher slurm: add it, or leave --nodes out"),
        (("--ranks-per-node", "1"), "--ranks-per-node needs --launcher slurm"),
        (("--gpus-per-node", "1"), "--gpus-per-node needs --launcher slurm"),
        (("--launcher", "local", "--partition", "a"), "--partition needs --launcher slurm"),
        (("--account", "a"), "--account needs --launcher slurm"),
        (("--time", "1"), "--time needs --launcher slurm"),
        (("--launcher", "pbs"), "--launcher 'pbs' is unknown: local, slurm"),
        ((*SLURM[1:], "--nodes", "0"), "--nodes is 0: it must be 1 or more"),
        ((*SLURM[1:], "--ranks-per-node", "-1"), "--ranks-per-node is -1: it must be 1 or more"),
        ((*SLURM[1:], "--gpus-per-node", "0"), "--gpus-per-node is 0: it must be 1 or more"),
        ((*SLURM[1:], "--nodes", "x"), "invalid value for '--nodes': 'x' is not a valid integer"),
        ((*SLURM[1:], "--nodes", "3"), "--tp 2 times --dp 1 is 2 ranks, which --nodes 3 does not divide"),
        ((*SLURM[1:], "--ranks-per-node", "3"), "--tp 2 times --dp 1 is 2 ranks, which --ranks-per-node 3 does not"),
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
        ((*SLURM[1:], "--tensor-save-dir", "/tmp/a\ntouch x"), "the root '/tmp/a\\ntouch x' has characters that Slurm"),
        ((*SLURM[1:], "--tensor-save-dir", "/tmp/%j"), "the root '/tmp/%j' has characters that Slurm"),
        ((*SLURM[1:], "--tensor-save-dir", "/tmp/a\\b"), "the root '/tmp/a\\\\b' has characters that Slurm"),
    ],
)
@pytest.mark.parametrize("dry", [(), ("--dry-run",)], ids=["submit", "dry run"])
def test_bad_input_is_one_line(command, capsys, tmp_path: Path, options, message: str, dry):
    assert command("run", *options, *dry) == 2
    out, err = capsys.readouterr()
    assert err.startswith(f"binade: {message}") and err.count("\n") == 1 and out == ""
    assert not list(tmp_path.iterdir())


def test_an_argument_that_no_script_can_hold(command, capsys, tmp_path: Path):
    corpus = tmp_path / "a\nb.jsonl"
    corpus.write_text('{"text": "a"}\n')
    assert command(*SLURM, "--dataset", str(corpus), "--dry-run") == 2
    out, err = capsys.readouterr()
    assert err.startswith("binade: the argument '") and "has unprintable characters" in err
    assert err.count("\n") == 1 and out == ""


def test_without_sbatch(command, capsys, monkeypatch, tmp_path: Path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert command(*SLURM) == 2
    err = capsys.readouterr().err
    assert err.startswith("binade: --launcher slurm submits with sbatch, which is not on this machine")
    assert err.count("\n") == 1 and not (tmp_path / "runs").exists()
    assert dry_script(command, capsys, *SLURM).startswith("#!/bin/bash")


def test_a_job_that_sbatch_refuses(command, capsys, cluster: Path, tmp_path: Path):
    executable(cluster, "sbatch", "import sys; sys.exit('sbatch: error: not so\\nsbatch: error: invalid partition')")
    assert command(*SLURM) == 1
    assert capsys.readouterr() == ("", "binade: sbatch refused the job: sbatch: error: invalid partition\n")
    assert not list((tmp_path / "runs" / ".slurm").iterdir())


def test_a_cluster_that_names_no_job(command, capsys, cluster: Path):
    executable(cluster, "sbatch", "print('queued')")
    assert command(*SLURM) == 1
    assert capsys.readouterr() == (
        "",
        "binade: sbatch named no job: its output is 'queued'\n",
    )


def test_a_root_that_cannot_be_written(command, capsys, cluster: Path, tmp_path: Path):
    (tmp_path / "runs").write_text("a file")
    assert command(*SLURM) == 1
    err = capsys.readouterr().err
    assert err.startswith(f"binade: cannot write to {tmp_path}/runs/.slurm: Not a directory; choose")
    assert err.count("\n") == 1


def test_a_rank_outside_a_job():
    done = subprocess.run(
        [sys.executable, "-m", "binade.collector.training.slurm_rank", "run"],
        cwd=PROJECT, capture_output=True, text=True,
        env={name: value for name, value in os.environ.items() if not name.startswith("SLURM_")},
    )  # fmt: skip
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("binade: slurm_rank is for tasks of srun")
