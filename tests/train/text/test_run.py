"""Whole runs of a tiny model in this process."""

import errno
import gc
import itertools
import os
import re
import shutil
import signal
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tutti.checkpoint import folder
from tutti.checkpoint.checkpoints import SaveError
from tutti.checkpoint.model import stored_model
from tutti.checkpoint.reader import CheckpointReader
from tutti.cli import main
from tutti.data import prefetch
from tutti.data.loader import Loader, batch_at, held_out_batches
from tutti.launch.launch import Interrupted
from tutti.observe.phases import read_phases
from tutti.train import command
from tutti.train.text import run
from tutti.train.text.config import Monitor
from tutti.train.text.history import read, series
from tutti.train.text.memory import live_bytes
from tutti.train.text.model import build_model, build_optimizer, model_config
from tutti.train.text.prepare import prepare
from tutti.train.text.progress import Display
from tutti.train.text.schedule import learning_rate

DATA = "__0_0.distcp"  # the tensors of rank 0


def losses(config):
    return series(read(command.Path(config.out)), "loss")


def eager_losses(config):
    """The same run as a plain loop over transformers and torch."""
    prepared = prepare(config, Display(silent=True))
    loader = Loader(prepared.train.open(), config.batch.size, config.batch.seq, config.seed)
    model = build_model(model_config(config.model, 300, config.batch.seq), config.seed, torch.float32)
    optimizer = build_optimizer(model, config.optimizer)
    out = []
    for step in range(config.schedule.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, config.optimizer.lr, config.schedule)
        loss = model(**loader(step)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        out.append(loss.item())
    return out, model


def test_a_run_gives_the_losses_of_a_plain_loop_and_a_model_that_transformers_loads(tiny, capsys):
    command.run(tiny)
    steps, values = losses(tiny)
    expected, model = eager_losses(tiny)
    assert steps == list(range(1, 9)) and values == pytest.approx(expected, rel=1e-5)
    assert values[-1] < values[0]
    out = capsys.readouterr().out
    newest = f"{tiny.out}/checkpoints/step-00000008"
    for text in ("read ", "tokenizer ", "plan ", f"step 8  saved {newest}", f"report      {tiny.out}/report.html"):
        assert text in out
    loaded = AutoModelForCausalLM.from_pretrained(f"{tiny.out}/model")
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[name], tensor, rtol=1e-4, atol=1e-6)
    assert AutoTokenizer.from_pretrained(f"{tiny.out}/model").model_max_length == 16
    checkpoints = sorted(os.listdir(f"{tiny.out}/checkpoints"))
    assert checkpoints == ["step-00000006", "step-00000008"]


@pytest.mark.slow
def test_the_plan_of_a_run_is_for_dry_runs(tiny, capsys):
    command.run(tiny)
    size, seq, clip = (str(x) for x in (tiny.batch.size, tiny.batch.seq, tiny.optimizer.clip_norm))
    assert main(["dryrun", f"{tiny.out}/plan.json", "--model", f"{tiny.out}/checkpoints/step-00000008", "--batch", size,
                 "--seq", seq, "--dtype", "float32", "--clip-norm", clip]) == 0  # fmt: skip
    assert "memory" in capsys.readouterr().out.split("saved ")[-1]


def test_held_out_losses_and_memory_are_measured(tiny):
    gc.collect()
    beside = live_bytes()  # what other tests have left
    command.run(tiny)
    lines = read(command.Path(tiny.out))
    steps, values = series(lines, "held_out_loss")
    assert steps == [0, 4, 8] and values[0] == pytest.approx(torch.log(torch.tensor(300.0)).item(), rel=0.01)
    assert values[2] < values[1] < values[0]
    ((step,), (peak,)) = series(lines, "peak_bytes")
    parameters = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(
        f"{tiny.out}/model").parameters())  # fmt: skip
    assert step == 4 and 4 * 3 * parameters < peak < 4 * 3 * parameters + 5e6 + beside  # weights, moments, the rest


def test_steps_are_recorded_and_their_phases_told(tiny, capsys):
    command.run(replace(tiny, monitor=Monitor(every=2)))
    assert f"tutti diagnose {tiny.out}" in capsys.readouterr().out
    assert main(["diagnose", tiny.out]) == 0
    out = capsys.readouterr().out
    assert "3 recorded steps, 4 to 8, on 1 ranks" in out and "matmuls" in out
    lines = read_phases(command.Path(tiny.out, "monitor"))[0]
    assert [line["step"] for line in lines] == list(range(1, 9))
    assert all(line["phases"]["step"] > 0 and line["peak_bytes"] > 1e6 for line in lines)
    assert [line["step"] for line in lines if "evaluation" in line["phases"]] == [1, 4, 8]
    assert {"tokens_per_second", "fraction_of_peak"} <= {key for line in read(command.Path(tiny.out)) for key in line}
    assert os.listdir(f"{tiny.out}/tensorboard/rank-0")


def test_batches_are_made_ahead_and_the_wait_for_them_is_told(tiny, monkeypatch):
    """By a clock that goes on two seconds with each batch of training, none of which is made before it is asked for."""
    now, asked, reads, loaded = [0.0], threading.Semaphore(0), itertools.count(), []

    def clock():
        value = now[0]
        if next(reads) % 2 == 0:
            asked.release()
        return value

    def slow(loader, step, make=Loader.__call__):
        if threading.current_thread() is threading.main_thread():  # the example
            return make(loader, step)
        assert asked.acquire(timeout=60)
        now[0] += 2.0
        loaded.append(step)
        return make(loader, step)

    monkeypatch.setattr(prefetch, "perf_counter", clock)
    monkeypatch.setattr(Loader, "__call__", slow)
    monkeypatch.setattr(
        run.Run, "evaluate", lambda self, **options: self.log({"eval_loss": 5.0})
    )  # it has batches of its own
    command.run(tiny)
    lines = [line for line in read(command.Path(tiny.out)) if "data_seconds" in line]
    assert loaded == list(range(8)) and [line["step"] for line in lines] == list(range(1, 9))
    assert [line["data_seconds"] for line in lines] == [2.0] * 8
    assert all(line["data_share"] == line["data_seconds"] / line["seconds"] for line in lines)
    assert all(set(line["phases"]) >= {"data", "step"} for line in read_phases(command.Path(tiny.out, "monitor"))[0])


def test_a_finished_run_says_so_and_trains_no_more(finished, capsys, monkeypatch):
    before = losses(finished)
    capsys.readouterr()
    monkeypatch.setattr(run, "train", None)
    command.run(finished)
    out = capsys.readouterr().out
    assert "all 8 steps are done; more need a larger schedule.steps" in out and "report.html" in out
    assert re.search(r"held-out loss \d\.\d+ after 8 steps, on \d+ batches; on all held-out text: tutti eval ", out)
    assert losses(finished) == before


def test_an_interrupted_run_saves_and_continues_bit_for_bit(finished, tiny, monkeypatch, capsys):
    other, real = tiny, run.Run.run_step

    def interrupted(self, batch):
        if self.done == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(self, batch)

    monkeypatch.setattr(run.Run, "run_step", interrupted)
    with pytest.raises(Interrupted, match="stopped by SIGTERM"):
        command.run(other)
    assert losses(other)[0] == [1, 2, 3, 4, 5]
    assert f"step 5  saved {other.out}/checkpoints/step-00000005" in capsys.readouterr().out
    monkeypatch.setattr(run.Run, "run_step", real)
    command.run(other)
    assert "continuing after step 5" in capsys.readouterr().out
    assert losses(other) == losses(finished)
    ends = [CheckpointReader(Path(c.out, "checkpoints/step-00000008")) for c in (finished, other)]
    assert ends[0].tensors == ends[1].tensors
    assert all(torch.equal(ends[0].whole(name), ends[1].whole(name)) for name in ends[0].tensors)


def test_a_damaged_checkpoint_is_passed_over_and_the_losses_are_the_same(finished, tiny, capsys):
    shutil.copytree(finished.out, tiny.out)
    (Path(tiny.out) / "checkpoints/step-00000008" / DATA).write_bytes(b"half")
    command.run(tiny)
    out = capsys.readouterr().out
    assert f"step-00000008 is not complete: {DATA} has 4 bytes" in out
    assert "continuing after step 6" in out
    assert losses(tiny) == losses(finished)


@pytest.fixture
def full_disk(monkeypatch):
    """`full_disk(4)`: there is no space while the checkpoint of step 4 is written."""
    real = folder.to_disk

    def at(*steps):
        def full(path):
            if any(f"{step:08d}" in str(path) for step in steps):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            real(path)

        monkeypatch.setattr(folder, "to_disk", full)

    return at


def test_training_goes_on_when_the_disk_is_full_for_a_while(tiny, full_disk, capsys):
    full_disk(4)
    command.run(tiny)
    out = capsys.readouterr().out
    assert "could not save the checkpoint of step 4" in out and "No space left on device" in out
    assert f"{tiny.out}/checkpoints/step-00000002 is intact; training continues" in out
    assert losses(tiny)[0] == list(range(1, 9))


@pytest.mark.slow
def test_a_full_disk_at_the_end_is_an_error_and_nothing_is_lost(tiny, finished, full_disk, monkeypatch):
    full_disk(8)
    with pytest.raises(SaveError, match=r"step 8 .*No space left.*step-00000006 is intact"):
        command.run(tiny)
    monkeypatch.undo()
    command.run(tiny)
    assert losses(tiny) == losses(finished)


def test_a_loss_that_is_not_a_number_ends_the_run_with_the_step(but):
    with pytest.raises(ValueError, match=r"the loss of step \d is nan; the newest checkpoint is of step .* lower"):
        command.run(but(optimizer={"lr": 1e30, "clip_norm": None, "max_nonfinite_steps": None}))


def test_what_is_not_finite_is_left_out_as_often_as_it_may_be_and_then_named(but, capsys):
    broken = but(optimizer={"lr": 1e30, "clip_norm": None, "max_nonfinite_steps": 2})
    said = r"step (\d) is not finite, after 2 in a row that were skipped: .* made .* on rank 0; .* newest .* lower"
    with pytest.raises(ValueError, match=said) as caught:
        command.run(broken)
    step = int(re.search(said, str(caught.value))[1])
    assert series(read(Path(broken.out)), "skipped") == ([step - 2, step - 1], [1, 2])
    assert losses(broken)[0] == list(range(1, step - 2))
    assert f"step {step - 1}  left out: loss or gradients are not finite" in capsys.readouterr().out


def test_a_folder_is_for_one_job_at_a_time(tiny):
    with run._locked(command.Path(tiny.out)), pytest.raises(ValueError, match="is in use by another job"):
        command.run(tiny)


def test_another_model_in_the_same_folder_is_an_error_and_another_rate_is_told(tiny, but, capsys):
    command.run(but(schedule={"steps": 2, "warmup": 1}))
    with pytest.raises(ValueError, match=r"another run: model\.hidden_size was 32 and is 64; choose another --out"):
        command.run(but(model={"hidden_size": 64}))
    capsys.readouterr()
    command.run(but(optimizer={"lr": 0.002}))
    assert "optimizer.lr was 0.001 and is 0.002" in capsys.readouterr().out
    assert losses(tiny)[0] == list(range(1, 9))


def test_changed_text_is_an_error(tiny, corpus, tmp_path):
    own = replace(
        tiny, data=replace(tiny.data, source=str(tmp_path / "text")), schedule=replace(tiny.schedule, steps=2)
    )
    folder = tmp_path / "text"
    folder.mkdir()
    for path in corpus.iterdir():
        (folder / path.name).write_text(path.read_text())
    command.run(own)
    (folder / "new.py").write_text("new = 1\n")
    with pytest.raises(ValueError, match=r"have changed since .* began; choose another --out"):
        command.run(own)


@pytest.mark.filterwarnings("ignore:no rule says how to split")
@pytest.mark.slow
def test_virtual_devices_give_the_same_losses(tiny, but, tmp_path):
    command.run(tiny)
    four = but(out=str(tmp_path / "four"), parallel={"cluster": "cpu:4", "plan": "dp2xtp2"})
    command.run(four)
    assert losses(four)[1] == pytest.approx(losses(tiny)[1], rel=1e-5)


def test_bfloat16_trains_with_float32_masters(but):
    config = but(parallel={"precision": "bfloat16"})
    command.run(config)
    newest = f"{config.out}/checkpoints/step-00000008"
    assert stored_model(Path(newest)).dtype is torch.bfloat16
    masters = {
        spec.dtype for name, spec in CheckpointReader(Path(newest)).tensors.items() if name.startswith("master:")
    }
    assert masters == {torch.float32}
    assert losses(config)[1][-1] < losses(config)[1][0]


def test_bfloat16_trains_without_masters(but):
    config = but(parallel={"precision": "bfloat16"}, optimizer={"stochastic_rounding": True})
    command.run(config)
    tensors = CheckpointReader(Path(f"{config.out}/checkpoints/step-00000008")).tensors
    state = {spec.dtype for name, spec in tensors.items() if name.startswith(("param:", "exp_avg", "master:"))}
    assert state == {torch.bfloat16}
    assert losses(config)[1][-1] < losses(config)[1][0]


def test_averages_are_evaluated_and_exported(but, tmp_path):
    config = but(optimizer={"name": "muon", "ema_decay": 0.5, "layer_decay": 0.8}, eval={"every": 8})
    command.run(config)
    stored = CheckpointReader(Path(config.out, "checkpoints/step-00000008"))
    exported = AutoModelForCausalLM.from_pretrained(f"{config.out}/model")
    for name, x in exported.named_parameters():
        assert torch.equal(x, stored.whole(f"ema:{name}")) and not torch.equal(x, stored.whole(f"param:{name}"))
    text = prepare(config, Display(silent=True)).held_out.open()
    windows = held_out_batches(text, config.batch.size, config.batch.seq, config.eval.batches)
    with torch.no_grad():
        wanted = [exported(**batch_at(text, starts, config.batch.seq)).loss.item() for starts in windows]
    assert series(read(Path(config.out)), "held_out_loss")[1][-1] == pytest.approx(sum(wanted) / len(wanted), rel=1e-5)
    assert losses(config)[1][-1] < losses(config)[1][0]


def test_there_is_nothing_to_round_in_float32(but):
    with pytest.raises(ValueError, match="stochastic_rounding needs a trained bfloat16 parameter"):
        command.run(but(parallel={"precision": "float32"}, optimizer={"stochastic_rounding": True}))


def test_a_run_keeps_its_masters(but):
    config = but(parallel={"precision": "bfloat16"})
    command.run(config)
    before = Path(config.out, "run.json").read_text()
    with pytest.raises(ValueError, match="stochastic_rounding was False and is True; choose another --out"):
        command.run(but(parallel={"precision": "bfloat16"}, optimizer={"stochastic_rounding": True}))
    assert Path(config.out, "run.json").read_text() == before


@pytest.mark.slow
def test_a_budget_of_memory_is_kept_with_state_on_disk(tiny, but):
    with pytest.raises(MemoryError, match="of its limit of 700 KiB: offload more"):
        command.run(but(out=f"{tiny.out}-small", parallel={"memory": "700KiB", "plan": "single"}))
    command.run(tiny)
    other = but(out=f"{tiny.out}-outside", parallel={"memory": "700KiB", "plan": "offload2"})
    command.run(other)
    assert losses(other) == losses(tiny)
