"""Files of data that are wrong: the message names the file, the line and the rule."""

import numpy as np
import pytest
import torch

from tutti.science.em.mt.config import MTConfig
from tutti.science.em.mt.mesh import Mesh2D
from tutti.science.em.mt.surveys.data import Data

HEAD = "mode,frequency_hz,site_m,quantity,value,error,weight\n"
ROW = "TE,10.0,0.0,log10_rho,2.0,0.1,1\n"


@pytest.mark.parametrize(("text", "message"), [
    ("", r"data.csv: there is no column mode; the first line must be mode,.*; the file is empty"),
    (HEAD, "data.csv has no row below the first line"),
    ("mode,frequency_hz\n", "no column site_m; .*; got mode,frequency_hz"),
    (HEAD + ROW + ROW.replace("10.0", "ten"), "data.csv, line 3: frequency_hz must be a number; got 'ten'"),
    (HEAD + ROW.replace("10.0", "nan"), "data.csv, line 2: frequency_hz must be positive, in Hz; got nan"),
    (HEAD + ROW.replace("10.0", "0"), "line 2: frequency_hz must be positive, in Hz; got 0"),
    (HEAD + ROW.replace(",0.0,", ",inf,"), "line 2: site_m must be a position in metres; got inf"),
    (HEAD + ROW.replace("2.0", "nan"), "line 2: value must be finite where weight is 1; got nan"),
    (HEAD + ROW.replace("2.0", "602.0"), "data.csv, line 2: log10_rho = 602 is not a log10 of ohm-m"),
    (HEAD + ROW.replace("0.1", "-0.1"), "line 2: error must be positive where weight is 1; got -0.1"),
    (HEAD + ROW.replace("TE", "TEM"), "line 2: mode must be one of TE, TM, tipper; got TEM"),
    (HEAD + ROW.replace(",1\n", ",2\n"), "line 2: weight must be 0 or 1; got 2"),
    (HEAD + "TE,10.0\n", "line 2: site_m must be a number; got None"),
    (HEAD + ROW + ROW.replace("log10_rho", "re_ohm"), "quantity 'log10_rho' of TE must be one of re_ohm, im_ohm"),
    (HEAD + ROW + ROW.replace("2.0", "3.0"), "line 3: log10_rho of TE at 10 Hz and x = 0 m was in line 2 already"),
])  # fmt: skip
def test_wrong_rows(tmp_path, text, message):
    (tmp_path / "data.csv").write_text(text)
    with pytest.raises(ValueError, match=message):
        Data.load(tmp_path / "data.csv")


def test_columns_may_be_in_any_order(tmp_path):
    names, values = (line.strip().split(",") for line in (HEAD, ROW))
    lines = [",".join(reversed(each)) for each in ([*names, "note"], [*values, "x"])]
    (tmp_path / "data.csv").write_text("\n".join(lines))
    assert Data.load(tmp_path / "data.csv").values.flatten().tolist() == [2.0, 0.0]


def test_a_spreadsheet_may_begin_with_a_byte_order_mark(tmp_path):
    (tmp_path / "data.csv").write_text(HEAD + ROW, encoding="utf-8-sig")
    assert Data.load(tmp_path / "data.csv").count == 1


@pytest.mark.parametrize(("write", "message"), [
    (lambda path: path.write_bytes(b""), "data.npz is no .npz file of arrays"),
    (lambda path: path.write_bytes(b"text"), "data.npz is no .npz file of arrays"),
    (lambda path: np.savez(path, sites=[1.0]), "data.npz has no array frequencies; it has sites"),
    (lambda path: np.savez(path, frequencies=[0.0], sites=[0.0], modes=["TE"], outputs="apparent",
                           values=np.ones(2), errors=np.ones(2), mask=np.ones(2)), "data.npz: frequencies are in Hz"),
])  # fmt: skip
def test_wrong_arrays(tmp_path, write, message):
    write(tmp_path / "data.npz")
    with pytest.raises(ValueError, match=message):
        Data.load(tmp_path / "data.npz")


def test_models_of_another_mesh_name_their_file(tmp_path):
    np.savez(tmp_path / "model.npz", log_rho=torch.zeros(3, 2).numpy())
    (tmp_path / "a.toml").write_text(f'[model]\nfile = "{tmp_path}/model.npz"\n')
    table = MTConfig.load(tmp_path / "a.toml")
    with pytest.raises(ValueError, match=r"model.npz must be finite, .* \(2, 2\) cells .*has the shape \(3, 2\)"):
        table.truth(Mesh2D([0, 1, 2], [0, 1, 2]))
