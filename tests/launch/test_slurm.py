"""Scripts of Slurm as text: their syntax, and that values survive the shell."""

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tutti.launch.cluster.job import ClusterJob, name_of
from tutti.launch.cluster.slurm import Slurm, script, submit, write

NASTY = ["a b", "it's", '"', "$HOME", "$(touch injected)", "`touch injected`", "*", "", "a;b", "\\", "#",
         "line\n#SBATCH --nodes=9\ntouch injected"]  # fmt: skip


def job(tmp_path: Path, **changes) -> ClusterJob:
    values = {"words": ("train", "runs/demo.toml"), "name": "demo", "folder": tmp_path / "job", "nodes": 2}
    return ClusterJob(**{**values, **changes})


def lines(text: str) -> list[str]:
    return [line.partition("  #")[0].strip() for line in text.splitlines()]


@pytest.mark.starts
@pytest.mark.parametrize("options", [{}, {"min_nodes": 1}, {"requeues": 0, "memory": "64G", "gpus": 4, "processes": 4}])
def test_the_script_is_bash(tmp_path, options):
    text = script(job(tmp_path, **options), Slurm(setup=("module load cuda",)), tmp_path)
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    assert "\nmodule load cuda\n" in text


def test_what_sbatch_reads(tmp_path):
    cluster_job = job(tmp_path, processes=4, gpus=4, memory="64G", grace=300)
    text = lines(script(cluster_job, Slurm("4:00:00", "gpu", "me", ("--constraint=a b", "--exclusive")), tmp_path))
    wanted = ["--job-name=demo", "--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=4", "--gpus-per-node=4",
              "--mem=64G", "--time=4:00:00", "--partition=gpu", "--account=me", f"--chdir={tmp_path}",
              f"--output={tmp_path}/job/logs/%j.txt", "--open-mode=append", "--requeue", "--signal=B:USR1@300",
              "--constraint='a b'", "--exclusive"]  # fmt: skip
    assert [line.removeprefix("#SBATCH ") for line in text if line.startswith("#SBATCH")] == wanted


def test_an_elastic_job_outlives_a_node(tmp_path):
    text = script(job(tmp_path, nodes=4, min_nodes=2), Slurm(), tmp_path)
    assert "#SBATCH --nodes=2-4" in text and "#SBATCH --no-kill" in text
    assert '--min=2 --max="${#nodes[@]}"' in text and "srun --label" in text and "--wait=0" in text


PRINT = "import json, sys; print(json.dumps(sys.argv[1:]))"


@pytest.mark.starts
def test_arguments_survive_the_script(tmp_path):
    """With the commands of Slurm replaced by functions, the script calls `tutti run` with the words as they were."""
    cluster_job = job(
        tmp_path, words=("train", *NASTY), name="nasty", folder=tmp_path / "it's a $(touch injected) folder"
    )
    path = write(cluster_job, Slurm(), tmp_path)
    tools = tmp_path / "tools"
    tools.mkdir()
    for name, text in {
        "scontrol": "echo host-1; echo host-2",
        "srun": f'while [ "$1" != -m ]; do shift; done; exec "{sys.executable}" -c "{PRINT}" "$@"',
    }.items():
        (tools / name).write_text(f"#!/bin/bash\n{text}\n")
        (tools / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "SLURM_JOB_ID": "20007",
                   "SLURM_CPUS_PER_TASK": "1", "SLURM_JOB_NODELIST": "host-[1-2]"}  # fmt: skip
    done = subprocess.run([str(path)], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    words = json.loads(done.stdout.splitlines()[-1])
    assert words[words.index("-m", 1) :] == ["-m", "tutti.cli", "train", *NASTY]
    assert "--meet=host-1:20007" in words and "--max=2" in words
    assert not (tmp_path / "injected").exists()
    assert f"--logs={cluster_job.folder}/logs/20007/attempt-0" in words
    assert Path(f"{cluster_job.folder}/logs/20007/attempt-0").is_dir()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"time": "soon"}, "--time 'soon': give minutes"),
        ({"options": ("exclusive",)}, "give an option of sbatch"),
    ],
)
def test_slurm_refuses(values, message):
    with pytest.raises(ValueError, match=message):
        Slurm(**values)


@pytest.mark.parametrize("options", [{"options": ("--comment=a\ntouch x",)}, {"partition": "a\rb"}])
def test_a_line_break_cannot_end_a_directive(tmp_path, options):
    with pytest.raises(ValueError, match="control character"):
        script(job(tmp_path), Slurm(**options), tmp_path)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"words": ()}, "no verb: write it after --"),
        ({"min_nodes": 3}, "--min-nodes 3 and --nodes 2"),
        ({"processes": 0}, "--processes is 0; it must be at least 1"),
        ({"gpus": -1}, "--gpus-per-node is -1"),
        ({"gpus": 2, "processes": 4}, "ranks do not share GPUs"),
        ({"cpus": 2, "processes": 4}, "give each process a core"),
        ({"memory": "lots"}, "such as 64G"),
        ({"name": "A name"}, "a name has at most"),
    ],
)
def test_a_job_refuses(tmp_path, values, message):
    with pytest.raises(ValueError, match=message):
        job(tmp_path, **values)


def test_a_job_is_named_after_its_config():
    assert name_of(("train", "runs/Demo_2.toml", "--out", "x")) == "train-demo-2"
    assert name_of(("rl", "train", "ppo-cartpole")) == "rl"
    assert name_of(("run", "a/b/train.py")) == "run-train"


def test_the_script_can_be_submitted_by_hand(tmp_path, monkeypatch):
    path = write(job(tmp_path), Slurm(), tmp_path)
    assert path.stat().st_mode & stat.S_IXUSR and (tmp_path / "job/logs").is_dir()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match=rf"no sbatch on this machine; submit {path}"):
        submit(path)
    (tmp_path / "sbatch").write_text("#!/bin/sh\necho 'sbatch: error: invalid partition' >&2; exit 1\n")
    (tmp_path / "sbatch").chmod(0o755)
    with pytest.raises(ValueError, match=r"does not take .*: sbatch: error: invalid partition"):
        submit(path)
