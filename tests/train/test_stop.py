import os
import signal

import pytest

from tutti.train.stop import StopSignal


@pytest.fixture(autouse=True)
def in_the_foreground():
    """A job in the background ignores interrupts, and so would this."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_signal_is_noted_once_the_loop_runs():
    with StopSignal() as stop:
        assert stop.agreed() == 0
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.agreed() == signal.SIGTERM


def test_before_the_first_question_and_after_the_end_signals_act_as_ever():
    before = signal.getsignal(signal.SIGINT)
    with StopSignal() as stop:
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        stop.agreed()
        assert signal.getsignal(signal.SIGINT) != before
    assert signal.getsignal(signal.SIGINT) == before
