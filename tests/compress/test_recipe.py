"""Recipes: what their names and files mean."""

import pytest

from tutti.compress import Prune, Quantize, Recipe, Rotate, Scheme, parse
from tutti.compress.recipe import from_toml

NAMES = {
    "int4": Quantize(Scheme(4, 64)),
    "int8": Quantize(Scheme(8, None)),
    "float8": Quantize(Scheme(8, None, kind="float8")),
    "w8a8": Quantize(Scheme(8, None, activations="int8")),
    "w8a8-smooth": Quantize(Scheme(8, None, activations="int8"), "smooth"),
    "int8-a8static": Quantize(Scheme(8, None, activations="int8-static")),
    "int4-g128-gptq": Quantize(Scheme(4, 128), "gptq"),
    "int3-channel-zeros-awq": Quantize(Scheme(3, None, False), "awq"),
    "int2-g16-s16-hqq": Quantize(Scheme(2, 16, scales="float16"), "hqq"),
    "int4-head-e8": Quantize(Scheme(4, 64), ignore=(), embeddings=Scheme(8, None)),
    "int4-e4": Quantize(Scheme(4, 64), embeddings=Scheme(4, 32)),
}


@pytest.mark.parametrize("name", NAMES)
def test_names(name):
    assert parse(name) == Recipe((NAMES[name],))


def test_steps_are_joined():
    both = Recipe((Rotate(), NAMES["int4"]))
    assert parse("rotate+int4") == both == Recipe((Rotate(),)) + Recipe((NAMES["int4"],))
    assert parse("rotate-untie + int4").steps[0] == Rotate(untie=True)
    assert [parse(x).calibrated for x in ("int4", "int4-hqq", "rotate+int8", "int4-gptq", "int8-a8static")] == [
        False, False, False, True, True,
    ]  # fmt: skip


def test_a_file(tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_text("""
[[step]]
kind = "rotate"
untie = true

[[step]]
scheme = "int4-g32"
method = "gptq"
ignore = ["lm_head", "*.0.*"]
overrides = [["*.down_proj", "int8"], ["*.v_proj", "keep"]]
embeddings = "int8"
damping = 0.05
""")
    step = Quantize(Scheme(4, 32), "gptq", ("*",), ("lm_head", "*.0.*"),
                    (("*.down_proj", Scheme(8, None)), ("*.v_proj", None)), Scheme(8, None), 0.05)  # fmt: skip
    assert parse(str(path)) == Recipe((Rotate(untie=True), step))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("int9", "'int9' is not a step"),
        ("int4-gtpq", "did you mean 'gptq'"),
        ("int4-zzz", "expected one of rtn"),
        ("", "is not a step"),
        ("int4+int8", "quantizes once"),
        ("int4+rotate", "put rotate before"),
        ("float8-gptq", "gptq rounds to integers"),
        ("int4-a8", "needs bits=8"),
        ("int4-gptq-awq", "gives method twice"),
        ("int4-g32-g64", "gives group twice"),
        ("w8a8-a8static", "gives activations twice"),
        ("prune-0.7-2:4", "give it, or sparsity"),
        ("shrink-heads0.5-heads0.25", "gives heads twice"),
        ("int4-e4-e8", "gives embeddings twice"),
        ("int4-g0", "expected a positive number"),
        ("distill-1.5", "'1.5' in recipe 'distill-1.5': expected a whole number"),
        ("shrink-heads0.5.5", "'heads0.5.5' in recipe .*: expected a number"),
        ("mixed-3GB-gptq", "'3GB' in recipe .*: expected bits of a weight, MB or ms"),
    ],
)
def test_names_that_are_wrong(text, message):
    with pytest.raises(ValueError, match=message):
        parse(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[step]]\nkind = 'shrunk'", "expected one of quantize, mixed, rotate"),
        ("[[step]]\nmethods = 'gptq'", "did you mean 'method'"),
        ("[[step]]\nscheme = 'int4-gptq'", "'gptq' in scheme"),
        ("[step]\nscheme = 'int4'", "expected tables"),
        ("scheme = 'int4'", "expected tables"),
        ("[[step]", "recipe.toml"),
        ("[[step]]\nscheme = 4", "scheme is 4; expected a text"),
        ("[[step]]\nignore = 'lm_head'", "ignore is 'lm_head'; expected a list"),
        ("[[step]]\nlayers = [1]", "a part of layers is 1; expected a text"),
        ("[[step]]\noverrides = [['*.down_proj']]", "expected a list of pairs of a pattern and a scheme"),
        ("[[step]]\nkind = 'mixed'\nbits = '3'", "bits is '3'; expected a number"),
        ("[[step]]\nkind = 'distill'\nsteps = true", "steps is True; expected a whole number"),
        ("[[step]]\nkind = 'rotate'\nuntie = 1", "untie is 1; expected true or false"),
    ],
)
def test_files_that_are_wrong(text, message, tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        from_toml(path)


def test_a_file_that_is_missing(tmp_path):
    with pytest.raises(ValueError, match=r"there is no file .*recipe.toml: a recipe is"):
        parse(str(tmp_path / "recipe.toml"))


def test_options_that_are_wrong():
    for options in (dict(method="nearest"), dict(strength=2.0), dict(damping=0.0)):
        with pytest.raises(ValueError, match="expected"):
            Quantize(**options)
    for step, options in ((Quantize, dict(damping=0.1)), (Quantize, dict(order=False)), (Quantize, dict(strength=0.1)),
                          (Prune, dict(method="wanda", damping=0.1))):  # fmt: skip
        with pytest.raises(ValueError, match="nothing for"):
            step(**options)
    with pytest.raises(ValueError, match="have no activations to round"):
        Quantize(embeddings=Scheme(8, None, activations="int8"))
    with pytest.raises(ValueError, match="at least one step"):
        Recipe(())
