"""Networks in folders, and folders that are not to be trusted."""

from __future__ import annotations

import json

import pytest
import torch
from mol_structures import molecule
from safetensors.torch import load_file, save_file

from tutti.science.mol.networks import Ensemble, MolCT, PaiNN, SchNet, load, load_ensemble, pack, save

KINDS = {"schnet": lambda: SchNet(8, 2, 6, 4.0), "painn": lambda: PaiNN(8, 1, 6, 4.0),
         "molct": lambda: MolCT(8, 1, 2, 3, 4.0, True)}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
def test_a_network_comes_back(tmp_path, kind, dtype):
    network, batch = KINDS[kind]().to(dtype), pack([molecule(6, 1, 4.0), molecule(3, 2, 4.0)])
    network.set_references({1: -13.6, 6: -1029.1}, 2.5)
    network.units = "MD"
    save(network, tmp_path)
    again = load(tmp_path)
    assert type(again) is type(network) and again.units == "MD" and again.options == network.options
    tensors = network.state_dict()
    assert all(torch.equal(x, tensors[name]) for name, x in again.state_dict().items())
    for one, other in zip(again.energy_and_forces(batch), network.energy_and_forces(batch), strict=True):
        torch.testing.assert_close(one.to(dtype), other.to(dtype))  # kernels may round by the address of a tensor
    assert {p.dtype for p in again.parameters()} == {dtype} and again.scale.dtype == torch.float64
    assert sorted(x.name for x in tmp_path.iterdir()) == ["config.json", "weights.safetensors"]


def test_the_species_of_training_come_back_and_older_files_have_none(tmp_path):
    network, path = SchNet(8, 1, 6, 4.0), tmp_path / "weights.safetensors"
    network.seen_species[[1, 8]] = True
    save(network, tmp_path)
    assert load(tmp_path).seen_species.nonzero().flatten().tolist() == [1, 8]
    tensors = load_file(path)
    save_file(tensors | {"seen_species": torch.ones(119)}, path)
    with pytest.raises(ValueError, match=r"seen_species is BOOL \[119\] by the config, but F32"):
        load(tmp_path)
    save_file(tensors | {"seen_species": torch.ones(7, dtype=torch.bool)}, path)
    with pytest.raises(ValueError, match=r"seen_species is BOOL \[119\] by the config, but BOOL \[7\]"):
        load(tmp_path)
    del tensors["seen_species"]
    save_file(tensors, path)
    assert not load(tmp_path).seen_species.any()
    fresh = SchNet(8, 1, 6, 4.0)
    fresh.load_state_dict(tensors)
    assert not fresh.seen_species.any()


def test_an_ensemble_comes_back(tmp_path):
    ensemble, batch = Ensemble([SchNet(8, 1, 6, 4.0), PaiNN(8, 1, 6, 4.0)]), pack([molecule(6, 1, 4.0)])
    save(ensemble, tmp_path)
    torch.testing.assert_close(load_ensemble(tmp_path).predict(batch).force_spread,
                               ensemble.predict(batch).force_spread, rtol=1e-4, atol=1e-7)  # fmt: skip
    with pytest.raises(ValueError, match="holds an ensemble: use load_ensemble"):
        load(tmp_path)
    with pytest.raises(ValueError, match="holds a single network: use load"):
        load_ensemble(tmp_path / "member-0")


def options(**change):
    return {"options": {"features": 8, "interactions": 2, "gaussians": 6, "cutoff": 4.0} | change}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "Linear"}, "kind is one of SchNet, PaiNN, MolCT, not 'Linear'"),
        ({"kind": ["SchNet"]}, "kind is one of"),
        ({"kind": "PaiNN"}, "weights.safetensors: .* is missing"),
        ({"format": 2}, "an object with format 1"),
        ({"units": "hartree"}, "units is one of"),
        ({"dtype": "float16"}, "dtype is one of float32, float64"),
        ({"dtype": "float64"}, r"is F64 .* by the config, but F32"),
        ({"more": 1}, "'more' is not known"),
        ({"options": []}, "options are an object"),
        ({"options": {"features": 8}}, "is missing"),
        (options(features=10**30), "a number of more than 18 digits"),
        (options(interactions=10**6), "interactions is a whole number from 1 to 256, not 1000000"),
        (options(features=True), "features is a whole number"),
        (options(features=8.0), "features is a whole number"),
        (options(features=16384), r"is F32 \[119, 16384\] by the config, but F32 \[119, 8\]"),
        (options(cutoff=float("nan")), "cutoff is a number above 0"),
        (options(cutoff=1e300), "cutoff is a number above 0 and below 1e6"),
        (options(cutoff="4"), "cutoff is a number above 0"),
        ({"kind": "Ensemble", "members": 10**9}, "is not known"),
    ],
)
def test_configs_that_do_not_fit_are_refused(tmp_path, change, message):
    save(SchNet(8, 2, 6, 4.0), tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=message):
        load(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, '{"format": ' + "9" * 5000 + "}", "\xff", " " * 2_000_000])
def test_files_that_are_no_configs_are_refused(tmp_path, text):
    save(SchNet(8, 2, 6, 4.0), tmp_path)
    (tmp_path / "config.json").write_bytes(text.encode("latin1"))
    with pytest.raises(ValueError, match=r"config\.json"):
        load(tmp_path)


def test_a_huge_ensemble_is_refused(tmp_path):
    save(Ensemble([SchNet(8, 1, 6), SchNet(8, 1, 6)]), tmp_path)
    (tmp_path / "config.json").write_text('{"format": 1, "kind": "Ensemble", "members": 1000000000}')
    with pytest.raises(ValueError, match="members is a whole number from 1 to 1024"):
        load_ensemble(tmp_path)


def test_weights_that_do_not_fit_are_refused(tmp_path):
    path = tmp_path / "weights.safetensors"

    def attempt(message: str, tensors: dict[str, torch.Tensor] | bytes) -> None:
        _ = path.write_bytes(tensors) if isinstance(tensors, bytes) else save_file(tensors, path)
        with pytest.raises(ValueError, match=message):
            load(tmp_path)

    save(SchNet(8, 2, 6, 4.0), tmp_path)
    good, whole = load_file(path), path.read_bytes()
    attempt("readout.2.bias is missing", {k: x for k, x in good.items() if k != "readout.2.bias"})
    attempt("'more' is not known", good | {"more": torch.zeros(1)})
    attempt("readout.2.bias is F32", good | {"readout.2.bias": torch.zeros(2)})
    attempt("scale is F64", good | {"scale": torch.ones(())})
    attempt("numbers that are not finite", good | {"readout.2.bias": torch.tensor([float("nan")])})
    attempt("weights.safetensors is damaged: ", whole[:1000])
    attempt("weights.safetensors is damaged: ", b"\xff" * 16)
    path.unlink()
    with pytest.raises(ValueError, match="there is no file"):
        load(tmp_path)
    with pytest.raises(ValueError, match=r"there is no file .*: give a folder"):
        load(tmp_path / "nothing")


def test_other_networks_are_not_saved(tmp_path):
    with pytest.raises(ValueError, match="a network of kind SchNet, PaiNN, MolCT or an Ensemble"):
        save(type("Own", (SchNet,), {})(8, 1, 6), tmp_path)
    with pytest.raises(ValueError, match="weights of float32 or float64"):
        save(SchNet(8, 1, 6).bfloat16(), tmp_path)
