"""Data sets that Minari itself opens, and data sets that Minari wrote."""

from __future__ import annotations

import json

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from tutti.rl.adapt import layout
from tutti.rl.adapt.gymnasium import Gymnasium
from tutti.rl.adapt.minari import Episode, describe, episodes, load, metadata, save, understand

minari = pytest.importorskip("minari")
SPACE = spaces.Dict(
    {
        "image": spaces.Box(0, 255, (32, 33, 3), np.uint8),
        "pair": spaces.Tuple((spaces.Discrete(5, start=-2), spaces.MultiBinary(3))),
        "x": spaces.Box(-np.inf, np.inf, (2, 2), np.float32),
    }
)
ACTIONS = spaces.Tuple((spaces.Discrete(3, start=1), spaces.MultiDiscrete([2, 4])))


@pytest.fixture(params=["arrow", "parquet", "hdf5"])
def format(request):
    if request.param == "hdf5":
        pytest.importorskip("h5py")
    return request.param


def same(x, y):
    assert type(x) is type(y)
    if isinstance(x, dict):
        assert x.keys() == y.keys()
        for key in x:
            same(x[key], y[key])
    elif isinstance(x, tuple):
        for a, b in zip(x, y, strict=True):
            same(a, b)
    else:
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


def played(env_id: str, steps: int) -> list[Episode]:
    """Episodes of random play."""
    env = Gymnasium(env_id, 1)
    obs, episodes, rows = env.reset(0), [], []
    env.action_space.seed(0)
    for _ in range(steps):
        action = np.array([env.action_space.sample()])
        moved = env.step(action)
        rows.append((obs[0], action[0], moved.reward[0], moved.terminated[0], moved.truncated[0]))
        if moved.terminated[0] or moved.truncated[0]:
            columns = [np.array(x) for x in zip(*rows, strict=True)]
            episodes.append(Episode(np.concatenate([columns[0], moved.last]), *columns[1:], seed=len(episodes)))
            rows = []
        obs = moved.obs
    return episodes


def nested(steps: int) -> Episode:
    SPACE.seed(steps)
    ACTIONS.seed(steps)
    obs = layout.gather(SPACE, [SPACE.sample() for _ in range(steps + 1)])
    actions = layout.gather(ACTIONS, [ACTIONS.sample() for _ in range(steps)])
    end = np.arange(steps) == steps - 1
    return Episode(obs, actions, np.arange(steps) / 2, end, np.zeros(steps, bool))


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
def test_minari_opens_what_is_saved(env_id, format, tmp_path, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    written = played(env_id, 450)
    save(tmp_path / "mine" / "random-v3", written, env_id, algorithm="random", author="us", description="play",
         dataset_id="mine/random-v3", format=format)  # fmt: skip
    data = minari.load_dataset("mine/random-v3")
    assert data.total_episodes == len(written) and data.total_steps == sum(len(e.rewards) for e in written)
    assert data.id == "mine/random-v3" and data.env_spec == gymnasium.spec(env_id)
    assert data.storage.metadata["author"] == {"us"} and data.storage.metadata["algorithm_name"] == "random"
    env = data.recover_environment()
    assert data.observation_space == env.observation_space and data.action_space == env.action_space
    assert [m["seed"] for m in data.storage.get_episode_metadata(range(2))] == [0, 1]
    for theirs, ours in zip(data.iterate_episodes(), written, strict=True):
        same(theirs.observations, ours.observations)
        same(theirs.actions, ours.actions)
        np.testing.assert_array_equal(theirs.rewards, ours.rewards)
        np.testing.assert_array_equal(theirs.terminations, ours.terminations)
        np.testing.assert_array_equal(theirs.truncations, ours.truncations)
    assert "mine/random-v3" in minari.list_local_datasets()


def test_nested_spaces_go_through_minari_and_back(format, tmp_path):
    written = [nested(4), nested(7)]
    save(tmp_path / "odd-v0", written, observation_space=SPACE, action_space=ACTIONS, format=format)
    data = minari.MinariDataset(tmp_path / "odd-v0" / "data")
    assert data.observation_space == SPACE and data.action_space == ACTIONS
    for theirs, ours in zip(data.iterate_episodes(), written, strict=True):
        same(layout.arrange(SPACE, theirs.observations), ours.observations)
        same(layout.arrange(ACTIONS, theirs.actions), ours.actions)
        assert theirs.observations["pair"][0].min() >= -2 and theirs.actions[0].min() >= 1
    for again, ours in zip(episodes(tmp_path / "odd-v0"), written, strict=True):
        same(again.observations, ours.observations)
        same(again.actions, ours.actions)
        assert again.seed is None


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("jpeg", [True, False])
def test_what_minari_wrote_is_read(format, jpeg, tmp_path, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    ours = [nested(3), nested(5)]
    buffers = [
        minari.data_collector.EpisodeBuffer(
            seed=7 + i, observations=layout.restore(SPACE, e.observations, len(e.rewards) + 1),
            actions=layout.restore(ACTIONS, e.actions, len(e.rewards)), rewards=list(e.rewards),
            terminations=list(e.terminations), truncations=list(e.truncations),
        )
        for i, e in enumerate(ours)
    ]  # fmt: skip
    theirs = minari.create_dataset_from_buffers(
        "theirs-v1", buffers, observation_space=SPACE, action_space=ACTIONS, data_format=format, jpeg_encoding=jpeg
    )
    for i, (again, e) in enumerate(zip(episodes(tmp_path / "theirs-v1"), ours, strict=True)):
        image = again.observations.pop("image")
        same(image, theirs[i].observations["image"])
        assert jpeg or np.array_equal(image, e.observations["image"])
        same(again.observations, {key: x for key, x in e.observations.items() if key != "image"})
        same(again.actions, e.actions)
        np.testing.assert_array_equal(again.rewards, e.rewards)
        assert again.seed == 7 + i
    assert metadata(tmp_path / "theirs-v1")["observation_space"] == SPACE


def test_load_gives_all_steps(format, tmp_path):
    written = played("CartPole-v1", 200)
    written[1].terminations[:] = False  # an episode that was cut off
    save(tmp_path / "steps-v0", written, "CartPole-v1", format=format)
    data = load(tmp_path / "steps-v0")
    steps = sum(len(e.rewards) for e in written)
    assert {key: len(x) for key, x in data.items()} == dict.fromkeys(data, steps)
    assert data["reward"].dtype == np.float32 and data["action"].dtype == np.int64
    ends = np.cumsum([len(e.rewards) for e in written]) - 1
    assert np.flatnonzero(data["terminated"] | data["truncated"]).tolist() == ends.tolist()
    assert data["truncated"][ends[1]] and not data["truncated"][ends[0]]
    inner = np.setdiff1d(np.arange(steps - 1), ends)
    np.testing.assert_array_equal(data["next_observation"][inner], data["observation"][inner + 1])
    np.testing.assert_array_equal(data["next_observation"][ends], [e.observations[-1] for e in written])


@pytest.mark.parametrize("space", [SPACE, ACTIONS, spaces.Box(-1, np.inf, (), np.float64), spaces.MultiBinary([2, 3])])
def test_spaces_in_words_are_minaris(space):
    words = json.dumps(describe(space))
    assert words == minari.serialization.serialize_space(space) or isinstance(space, spaces.MultiBinary)
    assert understand(json.loads(words)) == space == minari.serialization.deserialize_space(words)


def test_errors(tmp_path):
    good = played("CartPole-v1", 60)
    with pytest.raises(ValueError, match="'expert' is not a name of a data set; one is like 'hopper/expert-v0'"):
        save(tmp_path / "expert", good, "CartPole-v1")
    with pytest.raises(ValueError, match="no format 'zarr'; there are arrow, parquet, hdf5"):
        save(tmp_path / "a-v0", good, "CartPole-v1", format="zarr")
    with pytest.raises(ValueError, match="without an env_id, save needs"):
        save(tmp_path / "a-v0", good)
    short = Episode(
        good[0].observations[:-1], good[0].actions, good[0].rewards, good[0].terminations, good[0].truncations
    )
    with pytest.raises(ValueError, match=r"episode 1 of \d+ steps has observations or actions that do not fit"):
        save(tmp_path / "a-v0", [good[0], short], "CartPole-v1")
    save(tmp_path / "a-v0", good, "CartPole-v1")
    with pytest.raises(ValueError, match="exists already"):
        save(tmp_path / "a-v0", good, "CartPole-v1")
    with pytest.raises(ValueError, match=r"there is no data set at .*b-v0"):
        load(tmp_path / "b-v0")
    with pytest.raises(ValueError, match="has no fixed shape, and cannot be saved"):
        describe(spaces.Text(3))
