"""`tutti plan` as a command, in this process."""

import io
import re
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn
from transformers import ViTConfig

import tutti
from tutti import cli
from tutti.cli.plan.answer import in_float32, room
from tutti.cli.plan.workload import StepWork
from tutti.hardware import Cluster
from tutti.hardware.presets import PRESETS
from tutti.plan.explain import counted, figure
from tutti.plan.plan import Prediction
from tutti.plan.search.reasons import difference
from tutti.sim.error_bars import DENSE, spread
from tutti.tracing.load import load


def run(capsys, *arguments) -> tuple[int, str, str]:
    code = cli.main([str(a) for a in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def linear():
    """What an import path names: a model and a batch."""
    return nn.Sequential(nn.Linear(8, 8), nn.Flatten(0), nn.Softmax(0)), (torch.ones(4, 8),)


def scalar():
    class Summed(nn.Linear):
        def forward(self, x):
            return super().forward(x).square().sum()

    return Summed(8, 8), (torch.ones(4, 8),)


def test_plans_are_ranked_and_the_best_is_explained_and_saved(model, tmp_path, capsys):
    file = tmp_path / "plan.json"
    code, out, err = run(
        capsys, "plan", "--model", model, "--cluster", "h100:4", "--batch", "8", "--seq", "32", "--save", file
    )
    assert code == 0, err
    assert re.search(r"captured [\d,]+ nodes: .* parameters, .* FLOP a step", err)
    plan = tutti.Plan.load(file)
    rows = [line.split()[0] for line in out.splitlines() if line.rstrip().endswith(" yes")]
    assert plan.name in (rows[0], f"auto-{rows[0]}") and len(rows) == 5
    assert plan.explain() in out and out.rstrip().endswith(f"saved {file}")
    assert plan.cluster == "h100:4"


@pytest.mark.slow
def test_data_parallel_plans_that_the_batch_leaves_out_are_told(model, capsys):
    code, out, err = run(capsys, "plan", "--model", model, "--cluster", "h100:4", "--batch", "2", "--seq", "16")
    assert code == 0, err
    assert (
        "a batch of 2 does not divide over 4 devices: axes of that size split it unevenly or split another dim "
        "(a batch of 4 would divide)" in out
    )


def test_a_batch_that_is_too_small_for_a_plan_is_told_as_it_was_given(model, capsys):
    code, _, err = run(capsys, "plan", "--model", model, "--cluster", "cpu:4", "--batch", "3", "--seq", "16",
                       "--plan", "dp4")  # fmt: skip
    assert code and "a batch of 3 does not divide over 4 data-parallel devices" in err


def test_known_clusters_are_in_the_help_and_in_the_documents(capsys):
    assert cli.main(["plan", "--help"]) == 0
    page = (Path(__file__).parents[1] / "docs/guide/plans.md").read_text()
    for text in (capsys.readouterr().out, page):
        assert all(re.search(rf"\b{name}\b(?!:)", text) for name in PRESETS)


def test_a_saved_plan_is_what_parallelize_takes(model, tmp_path, capsys):
    file = tmp_path / "plan.json"
    options = ["--cluster", "cpu:4", "--plan", "tp2xzero3", "--batch", "4", "--seq", "16", "--dtype", "float32"]
    assert run(capsys, "plan", "--model", model, *options, "--save", file)[0] == 0
    network, batch = load(str(model), 4, 16, torch.float32)
    network = network.to_empty(device="cpu")
    for p in network.parameters():
        nn.init.normal_(p, std=0.02)
    for name, buffer in network.named_buffers():
        buffer.copy_(dict(type(network)(network.config).named_buffers())[name])
    batch = {key: torch.ones(x.shape, dtype=x.dtype) for key, x in batch.items()}
    optimizer = torch.optim.AdamW(network.parameters())
    step = tutti.parallelize(network, optimizer, batch, cluster="cpu:4", plan=file, level="O0")
    assert step.plan.name == "tp2xzero3"
    before = network(**batch).loss.item()  # the step updates the network
    assert step(batch).item() == pytest.approx(before, rel=1e-5)


def test_show_and_compare(model, tmp_path, capsys):
    files = {name: tmp_path / f"{name}.json" for name in ("dp2", "tp2")}
    for name, file in files.items():
        options = ["--cluster", "cpu:2", "--plan", name, "--batch", "4", "--seq", "16", "--save", file]
        assert run(capsys, "plan", "--model", model, *options)[0] == 0
    code, out, _ = run(capsys, "plan", "show", files["tp2"])
    assert code == 0 and out.rstrip() == tutti.Plan.load(files["tp2"]).explain()
    code, out, _ = run(capsys, "plan", "--compare", files["dp2"], files["tp2"])
    assert code == 0 and "- dp: 2\n" in out and "+ tp: 2\n" in out
    dp, tp = (tutti.Plan.load(files[name]) for name in ("dp2", "tp2"))
    assert out.rstrip().endswith(f"the second takes {difference(dp, tp)}")
    assert run(capsys, "plan", "--compare", files["dp2"], files["dp2"])[1].startswith("the plans say the same\n")


@pytest.mark.slow
def test_parts_that_are_given_and_why_a_parameter_lies_so(model, capsys):
    up = "model.layers.*.mlp.up_proj.weight"
    options = ["--batch", "8", "--seq", "32", "--mesh", "tp=2,dp=2", "--pin", f"{up}=tp:S1", "--accumulate", "2"]
    code, out, err = run(capsys, "plan", "--model", model, "--cluster", "h100:4", *options, "--why", up)
    assert code == 0, err
    assert "2 microbatches per update" in out and ": mesh tp 2 x dp 2 on h100:4" in out
    assert re.search(rf"^{re.escape(up)} +(dp:\S+ )?tp:S1", out, re.MULTILINE)
    assert re.search(rf"^were param:{re.escape(up)} (dp:\S+ )?tp:S0: [+-][\d.]+ \w+ a step \(", out, re.MULTILINE)


@pytest.mark.parametrize("optimizer", ["sgd", "lion", "lamb", "adamw8bit"])
def test_an_import_path(capsys, optimizer):
    options = ["--cluster", "cpu:2", "--plan", "dp", "--optimizer", optimizer]
    code, out, err = run(capsys, "plan", "--model", "test_cli_plan:scalar", *options)
    assert code == 0, err
    assert "plan dp: mesh dp 2 on cpu:2" in out and re.search("^batch 0 +dp:S0$", out, re.MULTILINE)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"--cluster": "h100x8"}, "unknown device 'h100x8'; 8 devices are h100:8"),
        ({"--plan": "auto-dp8"}, "no plan 'auto-dp8': a search chose its layouts; save it with --save FILE.json and"),
        ({"--cluster": "h10:8"}, "unknown device 'h10'; nearest is 'h100', known are cpu"),
        ({"--cluster": "h100:1x9"}, "a node has 8 h100"),
        ({"--model": "nowhere"}, "there is no model 'nowhere': give a folder with a transformers config.json"),
        ({"--model": "no_such_module:f"}, "there is no module 'no_such_module' for no_such_module:f"),
        ({"--model": "test_cli_plan:liner"}, "module test_cli_plan has no function 'liner'; did you mean linear?"),
        ({"--model": "test_cli_plan:cli.main"}, "module test_cli_plan has no function 'cli.main'"),
        ({"--model": "tutti.cli:usage"}, "tutti.cli:usage returned a str; it must return (model, batch)"),
        ({"--model": "test_cli_plan:linear"}, "the loss must be a 0-d floating tensor"),
        ({"--plan": "sum2"}, "no plan 'sum2': write auto, dp, tp"),
        ({"--plan": "ep2"}, "plan 'ep2': the model has no experts that axis 'ep' could split"),
        (
            {"--mesh": "dp:2", "--plan": "auto"},
            "--mesh 'dp:2' is no mesh: write its axes, outermost first, as in dp=4,tp=2",
        ),
        ({"--mesh": "dp=2"}, "plan 'dp' already fixes the mesh: leave out --mesh or --plan"),
        ({"--mesh": "dp=3", "--plan": "auto"}, "the mesh dp 3 has 3 devices, cpu:2 has 2"),
        ({"--pin": "x"}, "no pin 'x': write PATTERN=AXIS:S<dim>"),
        ({"--why": "nothing"}, "'nothing' matches no parameter"),
        ({"--level": "O7"}, "unknown level 'O7'; expected one of O0, O1, O2"),
        ({"--accumulate": "3", "--plan": "auto"}, "does not divide into 3 microbatches"),
        ({"--plan": "dp3"}, "plan 'dp3' needs 3 devices, not 2"),
        (
            {"--optimizer": "lyon"},
            "unknown optimizer 'lyon'; expected one of adadelta, adafactor, adagrad, adam, adamw, ",
        ),
        ({"--dtype": "int4"}, "unknown dtype 'int4'; expected one of float32, bfloat16"),
        ({"--batch": "0"}, "batch 0, seq 16: at least batch 1 and seq 2 are needed"),
    ],
)
def test_mistakes_are_one_line(model, capsys, change, message):
    options = {"--model": model, "--cluster": "cpu:2", "--batch": "4", "--seq": "16", "--plan": "dp"} | change
    code, _, err = run(capsys, "plan", *(part for option in options.items() for part in option))
    assert code == 2 and err.splitlines()[-1].startswith("tutti plan: ") and message in err


def test_files_that_are_no_plan_or_config(tmp_path, capsys):
    empty = tmp_path / "empty"
    empty.mkdir()
    (tmp_path / "config.json").write_text("{}")
    plan = ["plan", "--cluster", "cpu:2", "--model"]
    for arguments, message in (
        (["plan", "show", tmp_path / "config.json"], "config.json: not a plan: a plan is an object with the keys"),
        (["plan", "show", tmp_path / "missing.json"], "there is no file"),
        ([*plan, empty], f"no such file: {empty}/config.json; give a folder with a transformers config.json"),
        ([*plan, tmp_path / "config.json"], "config.json is not a transformers config: "),
    ):
        code, _, err = run(capsys, *arguments)
        assert code == 2 and message in err, err


def test_help_documents_every_option(capsys):
    assert cli.main(["plan", "--help"]) == 0
    out = capsys.readouterr().out
    assert all(text in out for text in ("--model", "--batch", "--seq", "transformers model"))


def test_a_loaded_model_takes_no_memory(model):
    network, batch = load(str(model / "config.json"), 3, 5)
    assert {p.device.type for p in network.parameters()} == {"meta"} and network.training
    assert {p.dtype for p in network.parameters()} == {torch.bfloat16}
    assert {key: tuple(x.shape) for key, x in batch.items()} == {"input_ids": (3, 5), "labels": (3, 5)}


def test_memory_at_the_peak_is_told_and_drawn(model, tmp_path, capsys):
    picture = tmp_path / "memory.svg"
    options = ("--cluster", "h100:2", "--batch", "8", "--seq", "32", "--plan", "zero3xrecompute", "--memory", picture)
    code, out, err = run(capsys, "plan", "--model", model, *options)
    assert code == 0, err
    assert "recomputes activations that layers do not pass on" in out
    assert "memory at the peak" in out and "optimizer state" in out and "<svg" in picture.read_text()
    assert out.rstrip().endswith(f"saved {picture}")


def test_names_of_plans_are_whole_and_a_narrow_terminal_has_fewer_columns(model, capsys):

    from tutti.cli.plan.answer import ranking
    from tutti.cli.plan.workload import Captured, StepWork, Workload
    from tutti.hardware import Cluster
    from tutti.plan.search.search import Search
    from tutti.sim.planning import Simulator

    captured = Captured(Workload(str(model), batch=8, seq=32), lambda text: None)
    better: list = []
    search = Search(captured.graph, 8, Cluster.parse("h100:4"), Simulator("O0"), better=better.append, error=0.08)
    plans = [search.judgement(search.planner(1).named(name)) for name in ("dp4", "dp2xtp2xzero3xfp32sums")]
    work = captured.facts.work
    assert work == StepWork(256, "tokens") and better[0].name == "dp4"
    for width, titles in ((200, "microbatches"), (100, "memory"), (60, "fits"), (30, "plan")):
        console = Console(width=width, record=True, file=io.StringIO())
        console.print(ranking(search, plans, work, console), crop=False)
        text = console.export_text()
        assert titles in text and all(re.search(rf"^ ?{p.name} ", text, re.MULTILINE) for p in plans)
        assert ("hidden" in text) == (width == 200)


def test_a_plan_with_room_is_preferred_to_one_as_fast_without():
    from types import SimpleNamespace

    from tutti.plan.search.search import Search

    def plan(name, step, peak):
        return SimpleNamespace(
            name=name, predicted=SimpleNamespace(step_seconds=step, peak_bytes=peak, bytes_by_tier={})
        )

    search = Search.__new__(Search)
    search.memory, search.error = 80, 0.08
    search.cluster = SimpleNamespace(device=SimpleNamespace(outside=SimpleNamespace(memory=0)))
    search.plans = [plan("full", 1.0, 78), plan("large", 0.9, 81), plan("slow", 1.2, 40), plan("roomy", 1.02, 70)]
    assert [p.name for p in search.in_order()] == ["roomy", "full", "slow", "large"]
    assert [search.tight(p) for p in search.plans] == [True, False, False, False]
    search.plans = search.plans[:3]
    assert [p.name for p in search.in_order()] == ["full", "slow", "large"]


def test_hours_and_money_of_an_amount_of_tokens(model, capsys):
    options = [
        "--cluster",
        "h100:2",
        "--plan",
        "dp2",
        "--batch",
        "8",
        "--seq",
        "32",
        "--what-if",
        "memory=1GiB,link=2x",
    ]
    code, out, err = run(capsys, "plan", "--model", model, *options, "--tokens", "1e9", "--price", "2.5")
    assert code == 0, err
    rate, each = (float(x.replace(",", "")) for x in re.search(r"([\d,]+) tokens/s, ([\d,]+) a device", out).groups())
    hours, money = re.search(r"on 2 devices: ([\d,.]+) device hours, ([\d,.]+) at 2.5 a device hour", out).groups()
    assert rate == pytest.approx(2 * each, rel=0.01)
    assert float(hours.replace(",", "")) == pytest.approx(2e9 / rate / 3600, rel=0.01)
    assert float(money.replace(",", "")) == pytest.approx(2.5 * 2e9 / rate / 3600, rel=0.01)
    assert "a step has 256 tokens, few for 2 devices" in out
    before = re.search(r"without memory=1GiB,link=2x: this plan takes \+(\S+ \w+) a step", out)
    assert before, "half as fast a link takes longer"
    energy = float(re.search(r"at most ([\d.]+) MWh: the devices alone, at their rated 700 W", out)[1])
    assert energy == pytest.approx(700 * 2e9 / rate / 3600 / 1e6, rel=0.01)
    options = ["--cluster", "cpu:2", "--plan", "dp2", "--batch", "8", "--seq", "32", "--tokens", "1e9"]
    assert "MWh" not in run(capsys, "plan", "--model", model, *options)[1], "no power of a CPU is known"
    assert "at their rated 200 W" in run(capsys, "plan", "--model", model, *options, "--what-if", "power=200W")[1]
    code, _, err = run(capsys, "plan", "--model", model, "--cluster", "h100:2", "--what-if", "memory=2")
    assert code == 2 and "memory=2: memory (a device's memory) is a factor such as 2x or an amount in GB" in err


def test_a_first_stage_without_products_does_not_lower_the_peak(model, capsys):
    options = ["--cluster", "h100:4", "--plan", "pp4", "--batch", "4", "--seq", "64", "--accumulate", "4"]
    code, out, err = run(capsys, "plan", "--model", model, *options)
    assert code == 0, err
    assert re.search(r"stage 0 .*embed_tokens$", out, re.MULTILINE)
    flops = float(re.search(r"([\d.e+]+) FLOP a step", err)[1])
    step = float(re.search(r"predicted step   ([\d.]+) ms", out)[1]) * 1e-3
    share = 100 * flops / (4 * PRESETS["h100"].device.peak["bfloat16"] * step)
    percent = re.search(r"of peak \(MFU\) +([\d.e-]+) % of the bfloat16 peak of 989 TFLOP/s", out)
    assert float(percent[1]) == pytest.approx(share, rel=0.02)


def test_the_answer_begins_with_a_summary(model, capsys):
    options = ["--cluster", "h100:4", "--batch", "8", "--seq", "32", "--plan", "dp2xtp2", "--tokens", "1e9"]
    code, out, err = run(capsys, "plan", "--model", model, *options)
    assert code == 0, err
    lines = out.splitlines()
    plan, duration, rate, peak, memory, tokens = lines[:6]
    assert plan == "plan             dp2xtp2 on h100:4, 1 microbatch per update"
    assert re.fullmatch(rf"time             \S+ [mu]s{spread(DENSE, Cluster.parse('h100:4'))} a step", duration)
    assert re.search(r"% of the bfloat16 peak of 989 TFLOP/s a device$", peak)
    assert re.fullmatch(r"memory +\S+ [MK]iB ± \d+ % of the 80 GiB of a device: 80 GiB \(100 %\) free", memory)
    assert rate.startswith("throughput ") and tokens.startswith("1e+09 tokens ") and "predicted step" not in peak
    assert err.splitlines()[0] == "reading the model", "before anything is imported"


def test_a_plan_that_does_not_fit_says_so_first(model, capsys):
    options = ["--cluster", "h100:4", "--batch", "8", "--seq", "32", "--plan", "dp4", "--what-if", "memory=0.0002GiB"]
    code, out, err = run(capsys, "plan", "--model", model, *options)
    assert code == 0, err
    plan, misfit = out.splitlines()[:2]
    assert re.fullmatch(r"plan +dp4 on h100:4, [12] microbatch(es)? per update", plan)
    assert misfit.startswith("does not fit     the device has too little memory; ")
    assert re.search(r"estimated to fit: --plan|neither other microbatches", misfit)
    assert re.search(r"^memory .* too much$", out, re.MULTILINE)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"--plan": "tp3"}, "plan 'tp3' needs 3 devices, not 8; the nearest is 'dp4xtp2'"),
        ({"--plan": "pp4xdp16xtp4xzero1"}, "needs 256 devices, not 8; the nearest is 'pp2xtp4'"),
        ({"--mesh": "dp=3"}, "the mesh dp 3 has 3 devices, h100:8 has 8"),
        ({"--tokens": "-1e12"}, "--tokens -1e+12: 0 or more, and finite"),
        ({"--price": "-2", "--tokens": "1e12"}, "--price -2: 0 or more, and finite"),
        ({"--budget": "0"}, "--budget 0: a number of seconds above 0"),
    ],
)
def test_options_are_checked_before_the_model_is_read(monkeypatch, capsys, change, message):
    from tutti.cli.plan import plan

    monkeypatch.setattr(plan, "Captured", None)
    options = {"--model": "nowhere", "--cluster": "h100:8"} | change
    code, _, err = run(capsys, "plan", *(part for option in options.items() for part in option))
    assert code == 2 and message in err


def test_a_saved_plan_for_another_number_of_devices(tmp_path, capsys):
    tutti.Plan({"dp": 4}).save(tmp_path / "plan.json")
    code, _, err = run(capsys, "plan", "--model", "nowhere", "--cluster", "h100:8", "--plan", tmp_path / "plan.json")
    assert code == 2 and "plan.json is for 4 devices, h100:8 has 8" in err


def test_a_model_in_float32_is_told_and_what_it_is_compared_with(capsys):
    code, out, _ = run(capsys, "plan", "--model", "test_cli_plan:scalar", "--cluster", "h100:2", "--plan", "dp")
    assert code == 0 and "% of the float32 peak of 66.9 TFLOP/s a device\n" in out
    assert "predicted without TF32, as PyTorch does by default; bfloat16 (model.to(torch.bfloat16)) would be" in out
    assert "the peaks are 66.9 and 989 TFLOP/s" in out
    assert in_float32("bfloat16", Cluster.parse("h100:2"), True) == []
    assert "(--dtype bfloat16)" in in_float32("float32", Cluster.parse("h100:2"), True)[0]
    assert in_float32("float32", Cluster.parse("v100-32:2"), False) == [], "it has no bfloat16"


def test_products_in_fp8_count_to_the_peak_of_bfloat16(model, capsys):
    options = ["--cluster", "h100:2", "--batch", "8", "--seq", "32", "--plan", "dp2xfp8"]
    code, out, err = run(capsys, "plan", "--model", model, *options)
    assert code == 0, err
    assert "% of the bfloat16 peak of 989 TFLOP/s a device, to which its products in FLOAT8 count too\n" in out


def test_what_a_what_if_does_not_change_and_what_is_best_without_it(model, capsys):
    options = ["--cluster", "h100:4", "--batch", "8", "--seq", "32", "--budget", "5", "--top", "1"]
    code, out, err = run(capsys, "plan", "--model", model, *options, "--what-if", "network=2x,memory=2x")
    assert code == 0, err
    assert "network=2x changes nothing on h100:4, which has one node\n" in out
    assert "memory=2x changes nothing" not in out
    name = re.search(r"without network=2x,memory=2x, the best plan is ([^:]+): ", out)[1]
    assert re.search(rf"^ {re.escape(name)} ", out, re.MULTILINE), "it is in the table"


def test_rows_of_an_image_model_do_not_depend_on_seq(tmp_path):
    config = ViTConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64)
    config.architectures = ["ViTForImageClassification"]
    config.save_pretrained(tmp_path)
    model, batch = load(str(tmp_path), 4, 64)
    assert "--seq has no effect" in StepWork.of(model, batch).note


def test_figures_have_three_digits():
    assert [figure(x) for x in (5.782, 0.5, 57.82, 99.96, 578.2, 12345.6)] == [
        "5.78",
        "0.5",
        "57.8",
        "100",
        "578",
        "12,346",
    ]
    assert [counted(n, "mesh", "meshes") for n in (1, 2)] == ["1 mesh", "2 meshes"] and counted(1, "other") == "1 other"


def test_the_room_of_a_device_is_what_its_peak_leaves():
    from types import SimpleNamespace

    search = SimpleNamespace(memory=80 * 2**30)
    plans = [tutti.Plan({}, prediction=Prediction(1, 1, 0, 0, 0, n * 2**30)) for n in (66, 161)]
    assert [room(search, p) for p in plans] == ["14 GiB (17.5 %) free", "81 GiB (101 %) too much"]  # pyright: ignore


def test_tokens_of_an_encoder_decoder_are_the_encoders(tmp_path, capsys):
    from transformers import T5Config

    T5Config(d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4, vocab_size=128, decoder_start_token_id=0,
             architectures=["T5ForConditionalGeneration"]).save_pretrained(tmp_path)  # fmt: skip
    options = ["--cluster", "h100:2", "--plan", "dp2", "--batch", "8", "--seq", "32"]
    code, out, err = run(capsys, "plan", "--model", tmp_path, *options)
    assert code == 0, err
    assert "tokens are the encoder's 32 of a row; the decoder's 32 are computed, but not counted\n" in out
    step = float(re.search(r"time +([\d.]+) ms", out)[1]) * 1e-3
    assert float(re.search(r"([\d,]+) tokens/s", out)[1].replace(",", "")) == pytest.approx(8 * 32 / step, rel=0.01)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_adapters_come_without_warnings(kind, tmp_path, recwarn):
    import transformers

    from tutti.cli.plan.workload import adapted

    configs = {
        "llama": transformers.LlamaConfig(
            hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4
        ),
        "gpt2": transformers.GPT2Config(n_embd=32, n_layer=1, n_head=4),
    }
    with torch.device("meta"):
        model = adapted(transformers.AutoModelForCausalLM.from_config(configs[kind]), 4)
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    assert names and all("lora_" in name for name in names)
    assert [str(w.message) for w in recwarn] == []
