import io
import warnings

from rich.console import Console

from tutti.train.text.progress import Display, line


def plain():
    out = io.StringIO()
    return Display(Console(file=out, soft_wrap=True, highlight=False)), out


def test_the_line_of_a_step():
    text = line(done=120, steps=600, loss=3.21, seconds=0.4, tokens=4096, peak_seconds=0.1, dtype="float32")
    assert text == "step 120 of 600  loss 3.2100  10,240 tokens/s  25 % of float32 peak  3:12 left"


def test_the_line_of_a_step_tells_of_data_that_is_waited_for():
    numbers = 1, 2, 3.0, 1.0, 10, 0.1, "float32"
    assert "peak  12 % waiting for data  0:01" in line(*numbers, waiting=0.12)
    assert "data" not in line(*numbers, waiting=0.004)


def test_off_a_terminal_a_stage_is_one_line():
    display, out = plain()
    with display.stage("read") as stage:
        stage.update(1, 2)
        stage.result("2 files")
    assert out.getvalue().startswith("read        2 files (0.") and out.getvalue().count("\n") == 1


def test_off_a_terminal_training_is_a_line_now_and_then_and_at_the_end():
    display, out = plain()
    with display.training(steps=50, first=0, compiles=True, dtype="float32") as bar:
        for done in range(1, 51):
            bar.step(done, 2.0, 0.1, 100, 0.05)
    lines = out.getvalue().splitlines()
    assert lines[0].startswith("compiling the step: about a minute") and "--parallel.level O0" in lines[0]
    assert lines[1].startswith("compile     and first step (")
    assert lines[2] == "step 2 of 50  loss 2.0000  1,000 tokens/s  50 % of float32 peak  0:05 left"
    assert lines[-1] == "step 50 of 50  loss 2.0000  1,000 tokens/s  50 % of float32 peak  0:00 left"


def test_what_is_not_compiled_is_not_said_to_be():
    display, out = plain()
    with display.training(steps=1, first=0, compiles=False, dtype="float32") as bar:
        bar.step(1, 2.0, 0.1, 100, 0.05)
    assert "compil" not in out.getvalue() and out.getvalue().startswith("first step\nfirst step  (")


def test_on_a_terminal_the_line_moves():
    out = io.StringIO()
    display = Display(Console(file=out, force_terminal=True, width=120, highlight=False))
    with display.training(steps=3, first=0, compiles=True, dtype="float32") as bar:
        for done in range(1, 4):
            bar.step(done, 2.0, 0.1, 100, 0.05)
        display.say("step 3  saved")
    assert "step 3 of 3  loss 2.0000" in out.getvalue() and "step 3  saved" in out.getvalue()
    assert "\x1b[" in out.getvalue()


def test_a_warning_is_a_line_said_once_unless_it_is_for_developers():
    display, out = plain()
    with warnings.catch_warnings(), display.warnings():
        warnings.simplefilter("always")
        for _ in range(2):
            warnings.warn("no rule for aten.foo", stacklevel=1)
            warnings.warn("an old name", FutureWarning, stacklevel=1)
    assert out.getvalue() == "note: no rule for aten.foo\n"


def test_square_brackets_are_shown_as_they_are():
    display, out = plain()
    display.say("model[0] [bold]")
    assert out.getvalue() == "model[0] [bold]\n"


def test_a_silent_display_shows_nothing():
    out = io.StringIO()
    display = Display(Console(file=out), silent=True)
    with display.stage("read") as stage:
        stage.result("2 files")
    with display.training(2, 0, compiles=False, dtype="float32") as bar:
        bar.step(1, 2.0, 0.1, 100, 0.05)
    display.say("hello")
    assert out.getvalue() == ""
