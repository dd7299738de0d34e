import json
import os
import signal
import subprocess
import sys

import pytest

import tutti
from tutti import cli
from tutti.launch import interrupt


def test_help_lists_every_verb(capsys):
    assert cli.main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"  {name} " in out and verb.summary in out for name, verb in cli.VERBS.items())


@pytest.mark.parametrize("columns", [60, 80, 300])
def test_help_fits_the_terminal(columns, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    for path, text in json.loads(cli.HELP.read_text()).items():
        assert cli.main([*path.split(), "--help"]) == 0
        printed = capsys.readouterr().out
        assert printed.split() == text.split()
        assert all(len(line) <= min(100, columns) or " " not in line.strip() for line in printed.splitlines())
        assert all(len(line) - len(line.lstrip()) <= 40 for line in printed.splitlines())


def test_every_verb_in_the_table_exists():
    assert all(callable(verb.load()) for verb in cli.VERBS.values())


def test_a_misspelt_verb_names_the_nearest(capsys):
    assert cli.main(["trian"]) == 2
    assert capsys.readouterr().err == "tutti: no verb 'trian'; did you mean train?\n"


def test_a_missing_package_names_the_extra_that_brings_it(capsys, monkeypatch):
    monkeypatch.setitem(cli.VERBS, "generate", cli.Verb("no_such_package:f", "", extra="train"))
    assert cli.main(["generate"]) == 2
    assert (
        capsys.readouterr().err == "tutti generate: there is no package no_such_package; pip install 'tutti[train]'\n"
    )


def test_the_version(capsys):
    assert cli.main(["--version"]) == 0 and capsys.readouterr().out == f"tutti {tutti.__version__}\n"


def test_a_folder_that_is_not_there_is_said_before_the_search(capsys):
    argv = ["plan", "--model", "none", "--cluster", "h100:2", "--save", "/no/such/plan.json"]
    assert cli.main(argv) == 2 and "--save /no/such/plan.json: there is no folder /no/such" in capsys.readouterr().err


def test_bad_input_is_one_line_and_exit_code_2(capsys):
    assert cli.main(["run", "-n", "2", "missing.py"]) == 2
    assert capsys.readouterr().err == "tutti run: no file missing.py\n"
    assert cli.main(["run", "-n", "2", "--max", "2", "--meet", "no.such.host.invalid:29400", __file__]) == 2
    assert "--meet no.such.host.invalid:29400: the host no.such.host.invalid cannot be found" in capsys.readouterr().err
    for port in ("65536", "9" * 30):
        assert cli.main(["run", "--max", "2", "--meet", f"localhost:{port}", __file__]) == 2
        assert f"localhost:{port}: the port must be a number up to 65535" in capsys.readouterr().err
    assert cli.main(["run", "--hang", "-1", __file__]) == 2
    assert "--hang is -1.0; it must be more than 0 seconds, or 0 to wait forever" in capsys.readouterr().err


@pytest.mark.parametrize("module", ["transformers", "tyro", "rich"])
@pytest.mark.starts
def test_help_imports_nothing_heavy(module):
    code = f"import sys; from tutti import cli; cli.main(['--help']); sys.exit({module!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


@pytest.mark.starts
def test_help_of_mt_does_not_wait_for_torch():
    code = "import sys; from tutti import cli; cli.main(['mt', 'invert', '--help'])"
    watched = f"try:\n  {code}\nfinally:\n  assert not {{'torch', 'matplotlib'}} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", watched], capture_output=True, text=True)
    assert "Folder of the results" in done.stdout and "AssertionError" not in done.stderr


@pytest.mark.starts
def test_the_package_runs_as_a_module():
    done = subprocess.run([sys.executable, "-m", "tutti", "trian"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, "tutti: no verb 'trian'; did you mean train?\n")


@pytest.mark.starts
def test_output_that_nobody_reads_is_no_error():
    code = "from tutti import cli; import sys; sys.exit(cli.main(['--help']))"
    reads, writes = os.pipe()
    os.close(reads)
    done = subprocess.run([sys.executable, "-c", code], stdout=writes, stderr=subprocess.PIPE, text=True)
    os.close(writes)
    assert (done.returncode, done.stderr) == (128 + 13, "")


def test_another_pipe_that_breaks_is_an_error(monkeypatch, capfd):
    def broken(rest):
        raise BrokenPipeError("a peer")

    monkeypatch.setattr(cli.Verb, "load", lambda verb: broken)
    with pytest.raises(BrokenPipeError, match="a peer"):
        cli.main(["run"])


def test_an_interrupt_is_a_line_at_once(monkeypatch, capfd):
    def interrupted(name, rest):
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert capfd.readouterr().err.strip() == "tutti train: interrupted"
        assert interrupt.received, "a run that goes on stops after its next step"
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(cli, "call", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert cli.main(["train", "run.toml"]) == 130
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert not interrupt.received, "a later run of this process is not stopped"
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["plan", "--seqlen", "8"], "tutti plan: no option --seqlen; did you mean --seq? tutti plan --help lists all"),
        (["train", "run.toml", "--schedule.stpes=3"], "no option --schedule.stpes; did you mean --schedule.steps?"),
        (["plan", "--serve", "--clutser", "x"], "did you mean --cluster? tutti plan --serve --help lists all"),
    ],
)
def test_an_option_that_is_misspelt_names_the_nearest(argv, message, capsys):
    assert cli.main(argv) == 2
    assert message in capsys.readouterr().err


def test_options_of_a_script_are_its_own(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import sys; print(sys.argv[1:])")
    done = subprocess.run(
        [sys.executable, "-m", "tutti", "run", script, "--model", "gpt2"], capture_output=True, text=True
    )
    assert "['--model', 'gpt2']" in done.stdout


def test_help_waits_for_nothing(capsys):
    code = "import sys; from tutti import cli; cli.main(['serve', '--help']); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and "--port" in done.stdout
