"""Misspelt keyword arguments are errors that name the nearest one."""

import pytest
import torch

import tutti
from tutti.keywords import check_name, names_nearest
from tutti.science.em.fdtd import Simulation
from tutti.serve import Engine


def test_the_nearest_is_named_and_others_are_python_s():
    @names_nearest
    def draw(width, *, colour="red"):
        return width, colour

    assert draw(2, colour="blue") == (2, "blue")
    with pytest.raises(TypeError, match=r"draw\(\) got an unexpected keyword argument 'color'; did you mean 'colour'"):
        draw(2, color="blue")
    with pytest.raises(TypeError, match=r"draw\(\) got an unexpected keyword argument 'zzz'$"):
        draw(2, zzz=1)


@pytest.mark.parametrize(
    ("function", "name", "nearest"),
    [
        (tutti.parallelize, "clip_nrom", "clip_norm"),
        (tutti.capture, "clipnorm", "clip_norm"),
        (tutti.TrainingArguments, "learning_rat", "learning_rate"),
        (Engine, "host_memroy", "host_memory"),
        (Simulation, "coruant", "courant"),
    ],
)
def test_public_functions_name_it(function, name, nearest):
    with pytest.raises(TypeError, match=f"'{name}'; did you mean '{nearest}'"):
        function(**{name: 1})


def test_a_step_takes_one_batch_and_a_loss_takes_the_model():
    model, x = torch.nn.Linear(4, 2), torch.ones(2, 4)
    optimizer = torch.optim.SGD(model.parameters())
    step = tutti.parallelize(model, optimizer, (x,), loss=lambda m, b: m(b[0]).sum(), level="O0", cluster="cpu:1")
    with pytest.raises(TypeError, match=r"a step takes one batch, .* for 2 tensors"):
        step(x, x)
    with pytest.raises(ValueError, match=r"loss is CrossEntropyLoss, but it is called as loss\(model, batch\)"):
        tutti.parallelize(model, optimizer, (x, x), loss=torch.nn.CrossEntropyLoss(), level="O0")


def test_names_of_keys():
    check_name("beta", ("beta",), "no")
    with pytest.raises(ValueError, match="no key betta; did you mean 'beta'"):
        check_name("betta", {"beta": 1, "seed": 2}, "no key betta")
    with pytest.raises(ValueError, match="no key x; there are beta, seed"):
        check_name("x", ["beta", "seed"], "no key x")
