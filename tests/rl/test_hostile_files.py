"""Files that would run code, are torn, or have values of the wrong kind: refused by name, and never executed."""

from __future__ import annotations

import base64
import errno
import json
import os
import pickle
import re
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from safetensors.torch import load_file, save_file

from tutti import whole_files
from tutti.checkpoint.tensor_file import write_tensors
from tutti.rl import PPO, Agent, Placed, adapt
from tutti.rl.adapt import minari, snapshot
from tutti.rl.core import files, plain
from tutti.rl.dataset import rows_of
from tutti.rl.networks.distributions import Categorical
from tutti.rl.networks.features import features_of
from tutti.rl.placement import job

SMALL = {"n_envs": 2, "n_steps": 4, "batch_size": 8, "n_epochs": 1, "hidden": (4,), "level": "eager"}


class Payload:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.fixture
def ran(tmp_path):
    """The file that a payload makes. It must not exist after the test."""
    path = tmp_path / "the-payload-ran"
    yield path
    assert not path.exists()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("agents")
    hosted = PPO("gymnasium:CartPole-v1", **SMALL).learn(16)
    return {"pure": PPO("CartPole-v1", **SMALL).save(folder / "pure"), "host": hosted.save(folder / "host")}


def changed(path: Path, to: Path, tensors=None, **settings) -> Path:
    """A file with other settings and tensors. A setting of None is left out."""
    about = {**files.about(path), **settings}
    about = {name: x for name, x in about.items() if name not in settings or x is not None}
    write_tensors({**load_file(path), **(tensors or {})}, to, {"about": json.dumps(about)})
    return to


def test_the_payload_would_run(tmp_path):
    pickle.loads(pickle.dumps(Payload(tmp_path / "ran")))
    assert (tmp_path / "ran").exists()


def test_no_file_of_an_agent_holds_a_pickle(saved):
    for path in saved.values():
        about = json.dumps(files.about(path))
        assert base64.b64encode(b"\x80\x05")[:3].decode() not in about.split('"host"')[0]
        assert b"\x80\x05\x95" not in path.read_bytes()


@pytest.mark.parametrize("kind", ["pickle", "pickle in the settings", "torn", "no settings", "not JSON", "list"])
def test_agents_are_not_loaded_from_hostile_files(kind, saved, ran, tmp_path):
    path, good = tmp_path / "agent", saved["host"]
    if kind == "pickle":
        path.write_bytes(pickle.dumps(Payload(ran)))
    elif kind == "pickle in the settings":
        changed(good, path, host=base64.b64encode(pickle.dumps(Payload(ran))).decode())
    elif kind == "torn":
        path.write_bytes(good.read_bytes()[:-100])
    elif kind == "no settings":
        save_file({"x": torch.zeros(1)}, path)
    else:
        save_file({"x": torch.zeros(1)}, path, {"about": "{" if kind == "not JSON" else "[1]"})
    for load in (Agent.load, PPO.load, files.about):
        with pytest.raises(ValueError, match=str(path)):
            load(path)


@pytest.mark.parametrize(
    ("name", "x"),
    [
        ("algorithm", 3),
        ("env", 3),
        ("seed", "x"),
        ("seed", 0.5),
        ("options", [1]),
        ("options", {"gamma": "x"}),
        ("options", {"n_steps": -1}),
        ("options", {"nosuch": 1}),
        ("unsaved", {}),
        ("episodes", 3),
        ("episodes", [["a", 1]]),
        ("level", "O9"),
        ("threads", 0),
        ("warm_until", None),
        ("num_timesteps", "many"),
        ("num_timesteps", -1),
        ("predictions", 1.5),
        ("score", "high"),
    ],
)
def test_settings_of_the_wrong_kind_name_the_file(saved, tmp_path, name, x):
    path = changed(saved["pure"], tmp_path / "agent", **{name: x})
    said = next(iter(x)) if isinstance(x, dict) and x else name
    with pytest.raises(ValueError, match=rf"{path} is damaged.*{said}"):
        Agent.load(path)


def test_tensors_that_are_missing_or_of_another_dtype_name_the_file(saved, tmp_path):
    tensors = load_file(saved["pure"])
    about = json.dumps(files.about(saved["pure"]))
    weights = tensors.pop("learner.weights")
    write_tensors(tensors, tmp_path / "a", {"about": about})
    with pytest.raises(ValueError, match=f"{tmp_path / 'a'} has no learner.weights"):
        Agent.load(tmp_path / "a")
    write_tensors({**tensors, "learner.weights": weights.long()}, tmp_path / "b", {"about": about})
    with pytest.raises(ValueError, match=f"{tmp_path / 'b'} has learner.weights of torch.int64"):
        Agent.load(tmp_path / "b")


@pytest.mark.parametrize("damage", ["cut", "flip", "about"])
def test_a_damaged_newest_file_is_passed_over_with_a_line(saved, tmp_path, capsys, damage):
    first, last = (tmp_path / f"steps-{n:010d}.safetensors" for n in (1, 2))
    content = bytearray(saved["pure"].read_bytes())
    first.write_bytes(content)
    if damage == "flip":
        content[-9] ^= 16
    elif damage == "about":
        content[content.index(b"num_timesteps") + 18] ^= 1
    last.write_bytes(content[: len(content) // 2] if damage == "cut" else content)
    newest = files.newest([first, last], files.whole)
    assert newest and newest.path == first
    assert f"{last} is" in capsys.readouterr().out
    with pytest.raises(ValueError, match=f"{last} is"):
        Agent.load(last)


def test_a_file_of_an_earlier_version_is_not_called_damaged(saved, tmp_path, capsys):
    about = json.dumps({**files.about(saved["pure"]), "format": "tutti.rl 1"})
    save_file(load_file(saved["pure"]), tmp_path / "steps-1.safetensors", {"about": about})
    with pytest.raises(ValueError, match="can be read"):
        files.newest([tmp_path / "steps-1.safetensors"], files.whole)
    assert "is of another version, in the format 'tutti.rl 1'" in capsys.readouterr().out


@pytest.mark.parametrize("placement", ["fused", "actors"])
def test_a_run_reads_the_files_that_it_resumes_from_once(tmp_path, monkeypatch, placement):
    def placed():
        return Placed("PPO", "CartPole-v1", placement, 1 if placement == "fused" else 2, **{**SMALL, "n_envs": 4})

    job.train(placed(), 16, [16], tmp_path, [])
    read, real = [], files.read_tensors
    monkeypatch.setattr(files, "read_tensors", lambda path: read.append(path) or real(path))
    job.resume(placed(), tmp_path)
    assert sorted(read) == sorted(tmp_path.glob("*.safetensors"))


def test_a_full_disk_leaves_the_file_before(saved, tmp_path, monkeypatch):
    path = tmp_path / "agent.safetensors"
    agent = PPO.load(saved["pure"])
    before = agent.save(path).read_bytes()

    def full(path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(whole_files, "to_disk", full)
    with pytest.raises(OSError, match=f"{path} cannot be written: No space left on device"):
        agent.save(path)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_a_file_does_not_import_the_module_of_its_environment(saved, tmp_path, monkeypatch, ran):
    (tmp_path / "hostile_module.py").write_text(f"open({str(ran)!r}, 'w')")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("hostile_module:Env-v0", "gymnasium:hostile_module:Env-v0"):
        path = changed(saved["host"], tmp_path / "agent", env=name)
        with pytest.raises(ValueError, match=rf"{path} names the environment .* import the module hostile_module"):
            Agent.load(path)


def test_states_of_environments_are_data(saved, tmp_path):
    """Classes and functions that a state names are those of the environment; none is imported or called."""
    one = PPO.load(saved["host"])
    two = PPO.load(saved["host"])
    for agent in (one, two):
        agent.learn(16)
    assert files.equal(one, two) and one.host.total.tolist() == two.host.total.tolist()
    for words in (
        ["object", "subprocess.Popen", [["args", "true"]]],
        ["stays", "os.system"],
        ["enum", "re.RegexFlag", "A"],
        ["array", "0", "O", [1]],
        ["generator", "default_rng", {}, None],
        ["ref", 7],
        ["eval", "1"],
        ["list"],
        {"a": 1},
        ["tensor", "0", "load", [1]],
        ["tensor", "0", "float32", [7]],
        ["number", "|S1", 1 << 20],
    ):
        with pytest.raises(ValueError, match=r"stored state|the state has|data type|dtype"):
            plain.unpack(words, {"0": np.zeros(8, np.uint8)}, one.env.envs[0])
        path = changed(saved["host"], tmp_path / "agent", host=words)
        with pytest.raises(ValueError, match=f"{path}: the state of its environments does not fit CartPole-v1"):
            Agent.load(path)


@pytest.mark.parametrize("make", [np.random.MT19937, np.random.Philox, np.random.RandomState])
@pytest.mark.parametrize("place", [-1, 1 << 40])
def test_generators_that_would_read_other_memory_are_refused(make, place):
    generator = make(0)
    words, arrays = plain.pack(generator if make is np.random.RandomState else np.random.Generator(generator))
    assert plain.unpack(words, arrays).bytes(8) == (
        generator if hasattr(generator, "bytes") else np.random.Generator(generator)
    ).bytes(8)
    name = "buffer_pos" if make is np.random.Philox else "pos"
    text = re.sub(rf'("{name}", )\d+', rf"\g<1>{place}", json.dumps(words))
    with pytest.raises(ValueError, match=f"{name} is {place}; it must be from 0 to"):
        plain.unpack(json.loads(text), arrays)


def test_a_generator_with_a_huge_pool_is_refused():
    words, arrays = plain.pack(np.random.default_rng(0))
    text = json.dumps(words).replace('["pool_size", 4]', f'["pool_size", {1 << 40}]')
    with pytest.raises(ValueError, match="a pool of"):
        plain.unpack(json.loads(text), arrays)


class Room(gymnasium.Env):
    """Objects that refer to one another, and one that has no equal in a new environment."""

    observation_space, action_space = spaces.Box(-9, 9, (1,)), spaces.Discrete(2)

    def __init__(self):
        self.things = [Thing(0), Thing(1)]
        self.best, self.rng, self.act = self.things[0], np.random.RandomState(3), self.first
        self.table = {(0, 1): np.array(["a"]), "o": np.array([None, 2], object)}

    def first(self): ...
    def second(self): ...

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}


class Thing:
    __slots__ = ("at",)

    def __init__(self, at):
        self.at = np.full(2, at)


def test_references_and_objects_of_an_environment_come_back():
    room, other = Room(), Room()
    room.reset(seed=0)
    room.things.append(Thing(5))
    room.best, room.act, room.spaces = room.things[2], room.second, room.action_space
    room.best.at[0], room.self = 9, room
    snapshot.load(other, json.loads(json.dumps(snapshot.save(room), default=lambda x: x.tolist()), object_hook=_arrays))
    assert other.best is other.things[2] and other.best.at.tolist() == [9, 5] and other.self is other
    assert other.act == other.second and other.table.keys() == room.table.keys()
    assert other.np_random.random() == room.np_random.random() and other.rng.rand() == room.rng.rand()
    with pytest.raises(ValueError, match=r"has a .*Thing, and the environment .* has none"):
        words, arrays = plain.pack([Thing(0)])
        plain.unpack(words, arrays, [1])


def _arrays(table):
    return {k: np.array(x, np.uint8) if k.isdigit() else x for k, x in table.items()}


def test_states_of_placed_runs(tmp_path, ran, capsys):
    def placed():
        options = {**SMALL, "n_envs": 4}
        return Placed("PPO", "CartPole-v1", "actors", 2, **options)

    job.train(placed(), 32, [16], tmp_path, [])
    before, ranks = sorted(tmp_path.glob("ranks-*"))
    ranks.rename(tmp_path / "elsewhere")
    job.resume(placed(), tmp_path)
    assert f"there is no file {ranks}: skipped\ncontinuing after 16 steps" in capsys.readouterr().out
    before.unlink()
    (tmp_path / "elsewhere").rename(ranks)
    next(tmp_path.glob("steps-*16.*")).unlink()
    good = ranks.read_bytes()
    for content, message in (
        (pickle.dumps(Payload(ran)), "is a pickle, "),
        (good[:-7], "is damaged: "),
        (good[:-1] + bytes([good[-1] ^ 1]), "is damaged: its content has changed since it was written"),
    ):
        ranks.write_bytes(content)
        with pytest.raises(ValueError, match=f"no file of an agent in {tmp_path} can be read"):
            job.resume(placed(), tmp_path)
        assert f"{ranks} {message}" in capsys.readouterr().out
    write_tensors({"0.count": torch.tensor(1)}, ranks)
    with pytest.raises(ValueError, match=f"{ranks} has no state"):
        job.resume(placed(), tmp_path)
    ranks.write_bytes(good)
    (tmp_path / job.REPORTED).write_bytes(pickle.dumps(Payload(ran)))
    with pytest.raises(ValueError, match=f"{tmp_path / job.REPORTED} does not hold a number of steps"):
        job.train(placed(), 64, [32], tmp_path, [])


@pytest.mark.parametrize(
    "text",
    [
        '{"place": {"ranks": "2"}}',
        '{"place": {"ranks": 0}}',
        '{"place": {"placement": 1}}',
        '{"place": 1}',
        "[",
        "\x80\x05",
    ],
)
def test_placements_of_the_wrong_kind(tmp_path, text):
    path = tmp_path / "plan.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=f"{path} is not a placement"):
        job.RunPlacement.load(path)


def recorded(folder: Path, format: str) -> Path:
    episode = minari.Episode(
        np.zeros((4, 1), np.float32), np.array([0, 1, 2]), np.ones(3), np.zeros(3, bool), np.array([False, False, True])
    )
    minari.save(
        folder / "a-v0",
        [episode],
        observation_space=spaces.Box(-1, 1, (1,)),
        action_space=spaces.Discrete(3),
        format=format,
    )
    return folder / "a-v0" / "data"


@pytest.mark.parametrize("format", ["arrow", "parquet", "hdf5"])
def test_episodes_in_hostile_files(tmp_path, format, ran):
    pytest.importorskip("h5py" if format == "hdf5" else "pyarrow")
    data = recorded(tmp_path, format)
    file = data / "main_data.hdf5" if format == "hdf5" else data / "0" / f"part-0.{format}"
    good = file.read_bytes()
    for content in (pickle.dumps(Payload(ran)), good[: len(good) // 2]):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=f"{data} cannot be read as a data set"):
            minari.load(data)


def test_columns_of_arrow_do_not_run_code(tmp_path, ran):
    """pyarrow could unpickle extension types of Python; it must not while a data set is read."""
    pa, ipc = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.ipc")
    data = recorded(tmp_path, "arrow")
    file = data / "0" / "part-0.arrow"
    table = ipc.open_file(str(file)).read_all()
    hostile = {
        b"ARROW:extension:name": b"arrow.py_extension_type",
        b"ARROW:extension:metadata": pickle.dumps(Payload(ran)),
    }
    schema = pa.schema([x.with_metadata(hostile) if x.name == "rewards" else x for x in table.schema])
    table = pa.Table.from_arrays(table.columns, schema=schema)
    with ipc.new_file(str(file), schema) as out:
        out.write_table(table)
    assert minari.load(data)["reward"].tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    "change",
    [
        {"total_episodes": "x"},
        {"total_episodes": -1},
        {"total_episodes": 7},
        {"data_format": 3},
        {"action_space": "[1]"},
        {"observation_space": '{"type": "Box", "low": 1}'},
        {"action_space": '{"type": "Code"}'},
        {"action_space": None, "env_spec": '{"id": "hostile_module:Env-v0"}'},
    ],
)
def test_metadata_of_the_wrong_kind(tmp_path, change, monkeypatch, ran):
    (tmp_path / "hostile_module.py").write_text(f"open({str(ran)!r}, 'w')")
    monkeypatch.syspath_prepend(tmp_path)
    data = recorded(tmp_path, "arrow")
    path = data / "metadata.json"
    about = {**json.loads(path.read_text()), **change}
    path.write_text(json.dumps({name: x for name, x in about.items() if x is not None}))
    with pytest.raises(ValueError, match=f"{data}.*cannot be read as a data set"):
        minari.load(data)
    path.write_bytes(pickle.dumps(Payload(ran)))
    with pytest.raises(ValueError, match=f"{path} cannot be read"):
        minari.metadata(data)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reward": np.array([1.0, np.nan])}, "reward is not finite"),
        ({"action": np.array([0, 3])}, "action .* outside"),
        ({"action": np.array([0.5, 1.0])}, "action .*whole numbers"),
        ({"action": np.array([None, 1])}, "action"),
        ({"observation": np.full((2, 1), np.inf)}, "observation is not finite"),
        ({"reward": np.array(["a", "b"])}, "reward"),
        ({"terminated": np.zeros(3, bool)}, "terminated"),
    ],
)
def test_arrays_of_data_of_the_wrong_kind(change, message):
    x = np.zeros((2, 1), np.float32)
    data = {
        "observation": x,
        "next_observation": x,
        "action": np.array([0, 1]),
        "reward": np.zeros(2),
        "terminated": np.zeros(2, bool),
        "truncated": np.array([False, True]),
    }
    space = spaces.Box(-1, 1, (1,))
    with pytest.raises(ValueError, match=message):
        rows_of({**data, **change}, features_of(space), Categorical(3), (space, spaces.Discrete(3)))


def test_environments_of_the_host_still_continue(tmp_path):
    env = adapt.make(lambda: gymnasium.make("FrozenLake-v1"), 2)
    agent = PPO(env, n_steps=4, batch_size=8, n_epochs=1, level="eager").learn(24)
    again = PPO.load(agent.save(tmp_path / "a"), adapt.make(lambda: gymnasium.make("FrozenLake-v1"), 2))
    for x in (agent, again):
        x.learn(24)
    assert files.equal(agent, again)
