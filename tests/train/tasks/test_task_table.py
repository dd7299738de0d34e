import doctest
import pickle

import pytest

from tutti.train.tasks import TASKS, Task, get_task, speech_pretraining, table


@pytest.mark.parametrize("name", TASKS)
def test_each_task_has_its_name_and_can_be_pickled(name):
    task = get_task(name)
    assert isinstance(task, Task) and task.name == name
    assert pickle.loads(pickle.dumps(task.collator(None))).task == task


@pytest.mark.parametrize("module", (table, speech_pretraining))
def test_examples(module):
    results = doctest.testmod(module)
    assert results.attempted and not results.failed


def test_an_unknown_name_names_the_nearest():
    with pytest.raises(ValueError, match=r"no task 'causal_lm'; the nearest is 'causal-lm'; the tasks are causal-lm,"):
        get_task("causal_lm")


def test_an_unknown_option_names_the_nearest():
    with pytest.raises(ValueError, match=r"masked-lm has no option 'probabilty'; the nearest is 'probability'"):
        get_task("masked-lm", probabilty=0.2)
