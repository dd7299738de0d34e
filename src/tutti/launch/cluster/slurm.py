"""A job of Slurm: a batch script, and its submission.

One task on each node runs `tutti run`, and the nodes meet at the first one. Some time before the limit Slurm signals
the script, which sends SIGTERM to the ranks. They save a checkpoint and end, and the script requeues the job, which
goes on from there. The same happens when a preempted job's tasks get SIGTERM. `tutti run` restarts ranks that fail.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tutti.launch.cluster.job import WAIT, ClusterJob

PORTS = 20_000  # the first of as many ports, from which a job's number chooses that of its rendezvous
TIME = re.compile(r"[0-9]+(:[0-9]{1,2}){0,2}|[0-9]+-[0-9]{1,2}(:[0-9]{1,2}){0,2}")


@dataclass(frozen=True)
class Slurm:
    """Options of a job on Slurm. time: its limit, as sbatch takes it. options: further ones of sbatch, such as
    "--constraint=a100". setup: shell lines before the ranks start."""

    time: str = ""
    partition: str = ""
    account: str = ""
    options: Sequence[str] = ()
    setup: Sequence[str] = ()

    def __post_init__(self):
        if self.time and not TIME.fullmatch(self.time):
            raise ValueError(
                f"--time {self.time!r}: give minutes, hours:minutes:seconds or days-hours, such as 4:00:00"
            )
        for option in self.options:
            if not option.startswith("-"):
                raise ValueError(f"--sbatch {option!r}: give an option of sbatch, such as --sbatch=--constraint=a100")


def script(job: ClusterJob, slurm: Slurm, where: Path) -> str:
    """The batch script. where: the folder that it runs in."""
    if job.replicas % job.nodes:
        raise ValueError(
            f"--replicas {job.replicas} on --nodes {job.nodes}: each node gets as many, so give a multiple"
        )
    if job.replicas and job.elastic:
        raise ValueError("--min-nodes is for ranks: replicas need all nodes, and are started again where they end")
    body = _replicas(job) if job.replicas else _ranks(job)
    return "\n".join([*_head(job, slurm, where), "", *_begin(job), *_setup(slurm), "", *body, *_end(job)]) + "\n"


def write(job: ClusterJob, slurm: Slurm, where: Path) -> Path:
    """Write the script, and make the folder of the logs. Returns the script's path."""
    (job.folder / "logs").mkdir(parents=True, exist_ok=True)
    path = job.folder / f"{job.name}.sh"
    path.write_text(script(job, slurm, where))
    path.chmod(0o755)
    return path


def submit(path: Path) -> str:
    """Submit a script. Returns the job's number. Raises ValueError with what sbatch says."""
    if not shutil.which("sbatch"):
        raise ValueError(
            f"there is no sbatch on this machine; submit {path} on a login node of the cluster: sbatch {path}"
        )
    done = subprocess.run(["sbatch", "--parsable", str(path)], capture_output=True, text=True)
    if done.returncode:
        said = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise ValueError(f"sbatch does not take {path}: {said}")
    return done.stdout.strip().partition(";")[0]


def _head(job: ClusterJob, slurm: Slurm, where: Path) -> list[str]:
    count = f"{job.least}-{job.nodes}" if job.elastic else f"{job.nodes}"
    each = job.replicas // job.nodes if job.replicas else 1
    options = [
        (f"--job-name={job.name}", ""),
        (f"--nodes={count}", ""),
        (f"--ntasks-per-node={each}", "" if job.replicas else "it starts the processes of its node"),
        (f"--cpus-per-task={max(1, job.cores // each)}", ""),
        (f"--gpus-per-node={job.gpus}" if job.gpus else "", ""),
        (f"--mem={job.memory}" if job.memory else "", "of each node"),
        (f"--time={slurm.time}" if slurm.time else "", ""),
        (f"--partition={slurm.partition}" if slurm.partition else "", ""),
        (f"--account={slurm.account}" if slurm.account else "", ""),
        (f"--chdir={where}", ""),
        (f"--output={_percent(job.folder)}/logs/%j.txt", "of this script and of the launchers"),
        ("--open-mode=append", "a requeued job continues the file"),
        ("--requeue" if job.requeues else "--no-requeue", "after preemption, or when a node fails"),
        (f"--signal=B:USR1@{job.grace}", "to this script, so many seconds before the limit"),
        ("--no-kill" if job.elastic else "", "the job goes on when a node fails"),
        *((option, "") for option in slurm.options),
    ]
    lines = [f"#SBATCH {_directive(option)}" for option, _ in options if option]
    width = max(map(len, lines)) if lines else 0
    notes = [note for option, note in options if option]
    shown = [f"{line:{min(width, 44)}}  # {note}" if note else line for line, note in zip(lines, notes, strict=True)]
    return ["#!/bin/bash", "# Written by `tutti launch --slurm`. Submit it again with sbatch.", *shown]


def _directive(option: str) -> str:
    """An option in a line of #SBATCH, which has quotes as the shell has, and no line breaks."""
    if re.search(r"[\x00-\x1f\x7f]", option):
        raise ValueError(f"the option {option!r} of sbatch has a control character, such as a line break: leave it out")
    name, sign, value = option.partition("=")
    if not re.fullmatch(r"--?[A-Za-z][\w-]*( .*)?", name):
        raise ValueError(f"the option {option!r} of sbatch does not begin with a name, as in --constraint=a100")
    return name + sign + (shlex.quote(value) if value else "")


def _percent(folder: Path) -> str:
    """A folder in a name of a log, where % is special."""
    return str(folder).replace("%", "%%")


def _begin(job: ClusterJob) -> list[str]:
    return [
        "attempt=${SLURM_RESTART_COUNT:-0}  # how often it was requeued",
        f"logs={shlex.quote(str(job.folder))}/logs/$SLURM_JOB_ID/attempt-$attempt",
        'mkdir -p "$logs"',
        'mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")',
        'echo "$(date): job $SLURM_JOB_ID, attempt $attempt, on ${nodes[*]}; logs of ranks in $logs"',
    ]


def _setup(slurm: Slurm) -> list[str]:
    return ["", *slurm.setup] if slurm.setup else []


def _ranks(job: ClusterJob) -> list[str]:
    """Start `tutti run` on each node."""
    options = [f"--min={job.least}", '--max="${#nodes[@]}"', '--meet="${nodes[0]}:$port"', f"--wait={WAIT}",
               *job.limits(), '--logs="$logs"']  # fmt: skip
    # A launcher that is left alone by the others ends after the grace; those of an elastic job go on.
    srun_options = [
        f"--wait={0 if job.elastic else job.grace}",
        "--kill-on-bad-exit=0",
        *(["--no-kill"] if job.elastic else []),
    ]
    return [
        f"port=$(({PORTS} + SLURM_JOB_ID % {PORTS}))  # where the nodes meet, on the first of them",
        "command=(",
        f"  {shlex.quote(job.python or sys.executable)} -m tutti.cli run {' '.join(options)}",
        f"  {' '.join(map(shlex.quote, job.target()))}",
        ")",
        "",
        *_trap("the ranks save a checkpoint and end"),
        f'srun --label --cpus-per-task="$SLURM_CPUS_PER_TASK" {" ".join(srun_options)} "${{command[@]}}" &',
        "step=$!",
        *WAITING,
    ]


def _trap(why: str) -> list[str]:
    return [
        f"# Before the time limit, and on preemption: {why}.",
        "stopped=",
        'stop() { stopped=yes; scancel --signal=TERM "$SLURM_JOB_ID" 2>/dev/null; }  # to tasks, not to this script',
        "trap stop USR1 TERM",
    ]


WAITING = [
    "wait $step; status=$?",
    "while kill -0 $step 2>/dev/null; do wait $step; status=$?; done  # a signal ends `wait`, not the step",
]


def _end(job: ClusterJob) -> list[str]:
    """Requeue the job if it was stopped, unless by scancel."""
    done = "" if job.replicas else '[ "$status" -eq 0 ] && exit 0\n'
    return [
        "",
        "# An error of a rank ends the job. A signal (status above 128) does not, unless it came from scancel.",
        f'{done}state=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T)',
        'if [ -z "$stopped" ] && [ "$status" -le 128 ]; then',
        '  echo "$(date): failed with status $status"',
        'elif [ "$state" != RUNNING ]; then',
        '  echo "$(date): ended by Slurm, state $state"',
        f'elif [ "$attempt" -ge {job.requeues} ]; then',
        f'  echo "$(date): stopped with status $status, and not requeued: it was {job.requeues} times (--requeues)"',
        "else",
        '  echo "$(date): stopped with status $status; requeued"',
        '  scontrol requeue "$SLURM_JOB_ID"',
        "fi",
        'exit "$status"',
    ]


def _replicas(job: ClusterJob) -> list[str]:
    """Servers on all nodes, each started again when it ends, and a router to them on the first."""
    each = job.replicas // job.nodes
    words = [job.python or sys.executable, "-m", "tutti.cli", "serve"]
    return [
        f"port=$(({PORTS} + SLURM_JOB_ID % {PORTS}))  # of the first replica",
        "replicas=()",
        f"for ((i = 0; i < {job.replicas}; i++)); do",
        f'  replicas+=("http://${{nodes[i / {each}]}}:$((port + i))")',
        "done",
        f"command=({shlex.join([*words, *job.words[1:], '--host', '0.0.0.0', '--port'])})",
        f'router=({shlex.join([*words, *job.router, "--replicas"])} "${{replicas[@]}}")',
        "",
        *_trap("servers finish what they have"),
        "export port logs",
        'srun --label --cpus-per-task="$SLURM_CPUS_PER_TASK" bash -c \'',
        "  trap stopped=yes TERM",
        '  until [ -n "$stopped" ]; do',
        '    "$@" $((port + SLURM_PROCID)) >>"$logs/replica-$SLURM_PROCID.txt" 2>&1 &',
        "    wait $!; wait $!  # the second time for its end after a signal",
        '    echo "replica $SLURM_PROCID has ended"; sleep 1',
        "  done",
        '\' replica "${command[@]}" &',
        'srun --overlap --label --nodes=1 --ntasks=1 --nodelist="${nodes[0]}" "${router[@]}" &',
        "step=$!",
        *WAITING,
        '[ "$status" -eq 0 ] && status=143  # a router ends well after SIGTERM',
    ]
