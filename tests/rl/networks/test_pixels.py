"""Pictures: convolutions as Stable-Baselines3 has them, chosen for uint8 images, and a replay of bytes."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from tutti.rl import A2C, DQN, PPO, SAC, adapt
from tutti.rl.algorithms import algorithm
from tutti.rl.networks.features import features_of
from tutti.rl.networks.pixels import NatureCNN, scaled
from tutti.rl.offline_data import episodes

OFF = {"learning_starts": 8, "buffer_size": 64, "batch_size": 8, "level": "eager"}


class Side(gymnasium.Env):
    """A bright half of a picture; the reward is 1 for the action of its side."""

    def __init__(self, first=False, size=36, box=False):
        shape = (1, size, size) if first else (size, size, 1)
        self.first, self.size = first, size
        self.observation_space = spaces.Box(0, 255, shape, np.uint8)
        self.action_space = spaces.Box(-1, 1, (1,)) if box else spaces.Discrete(2)

    def seen(self):
        self.side = int(self.np_random.integers(2))
        x = np.zeros((self.size, self.size), np.uint8)
        x[:, self.side * self.size // 2 : (self.side + 1) * self.size // 2] = 200
        return x[None] if self.first else x[..., None]

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.seen(), {}

    def step(self, action):
        reward = float((np.asarray(action).reshape(-1)[0] > 0) == self.side)
        self.t += 1
        return self.seen(), reward, False, self.t >= 8, {}


class Torch(nn.Module):
    """NatureCNN as it stands in the paper and in Stable-Baselines3, in plain PyTorch."""

    def __init__(self, channels, size):
        super().__init__()
        self.cnn = nn.Sequential(
            nn.Conv2d(channels, 32, 8, 4),
            nn.ReLU(),
            nn.Conv2d(32, 64, 4, 2),
            nn.ReLU(),
            nn.Conv2d(64, 64, 3, 1),
            nn.ReLU(),
            nn.Flatten(),
        )
        with torch.no_grad():
            n = self.cnn(torch.zeros(1, channels, size, size)).shape[1]
        self.linear = nn.Sequential(nn.Linear(n, 512), nn.ReLU())

    def forward(self, x):
        return self.linear(self.cnn(x.float() / 255))


@pytest.mark.parametrize(("channels", "size"), [(1, 36), (3, 84), (4, 50)])
def test_convolutions_are_those_of_the_paper(channels, size):
    ours, theirs = NatureCNN((channels, size, size)), Torch(channels, size)
    theirs.load_state_dict({a: b for a, b in zip(theirs.state_dict(), ours.state_dict().values(), strict=True)})
    picture = torch.randint(256, (5, channels, size, size), dtype=torch.uint8)
    outputs = ours(scaled(picture.flatten(1)))
    torch.testing.assert_close(outputs, theirs(picture))
    torch.testing.assert_close(ours(scaled(picture.flatten(1)).view(5, 1, -1)), outputs.unsqueeze(1))


@pytest.mark.parametrize("first", [False, True])
def test_channels_first_and_last_are_one_picture(first):
    space = Side(first).observation_space
    features = features_of(space, pixels=True)
    picture = torch.randint(256, (2, *space.shape), dtype=torch.uint8)
    x = features(picture)
    assert features.image == (1, 36, 36) and x.dtype == torch.uint8 and torch.equal(features.picture(x), picture)
    assert torch.equal(features_of(space)(picture), scaled(x))


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("kind", [PPO, A2C])
def test_policies_see_pictures_with_one_pair_of_eyes(kind, first):
    agent = kind(adapt.make(lambda: Side(first), 2), level="eager")
    assert agent.image == (1, 36, 36) and agent.config.hidden == ()
    names = set(agent.net.shapes)
    assert {"eyes.convolutions.0.weight", "eyes.linear.0.weight", "actor.0.weight", "critic.0.weight"} <= names
    assert agent.net.shapes["actor.0.weight"] == (2, 512) and agent.net.shapes["critic.0.weight"] == (1, 512)
    picture = Side(first).reset(seed=0)[0]
    one = agent.predict(picture)[0]
    assert one == agent.predict(np.stack([picture, picture]))[0][0]
    weights = agent.program.state()["learner"]["weights"]
    x = agent.features(torch.from_numpy(picture)[None])
    both, alone = agent.net(weights, x, x), (agent.net(weights, x, None)[0], agent.net(weights, None, x)[1])
    torch.testing.assert_close(both[0], alone[0])
    torch.testing.assert_close(both[1], alone[1])
    torch.testing.assert_close(agent.net(weights, scaled(x), None)[0], both[0])


@pytest.mark.parametrize(
    "kind", ["DQN", "DuelingDQN", "PrioritizedDQN", "C51", "QRDQN", "Rainbow", "SAC", "TD3", "DDPG", "TQC"]
)
def test_replays_hold_bytes(kind):
    box = kind in ("SAC", "TD3", "DDPG", "TQC")
    more = {"hidden": (16,)} if box else {}
    agent = algorithm(kind)(adapt.make(lambda: Side(box=box), 1), **OFF, **more).learn(10)
    rows = agent.program.state()["replay"]["rows"]
    assert rows["obs"].dtype == rows["last"].dtype == torch.uint8 and rows["obs"].nbytes == 64 * 36 * 36
    assert set(rows["obs"].unique().tolist()) == {0, 200} and agent.image
    assert agent.replay.bytes(agent.row_shapes()) < 64 * (2 * 36 * 36 + 40)


def test_which_policy_sees_a_picture():
    assert PPO("MlpPolicy", Side(), level="eager").image is None
    assert PPO("CnnPolicy", Side(), level="eager").image == (1, 36, 36)
    assert PPO(Side(size=24), level="eager").image is None
    assert PPO("CnnPolicy", Side(), hidden=(16,), level="eager").net.shapes["actor.0.weight"] == (16, 512)
    for wrong, message in (
        (lambda: PPO("CnnPolicy", Side(size=35)), r"at least 36 x 36; Side has Box\(0, 255"),
        (lambda: DQN("CnnPolicy", "CartPole-v1"), "CnnPolicy is for pictures"),
        (lambda: algorithm("RND")("CnnPolicy", Side()), "RND has no convolutions"),
        (lambda: PPO("MultiInputPolicy", Side()), "is no Dict or Tuple"),
    ):
        with pytest.raises(ValueError, match=message):
            wrong()


def test_an_agent_that_sees_is_saved_and_recorded(tmp_path):
    agent = PPO("CnnPolicy", adapt.make(Side, 2), n_steps=8, batch_size=16, n_epochs=1, level="eager").learn(32)
    again = PPO.load(agent.save(tmp_path / "a"), adapt.make(Side, 2))
    assert again.image and torch.equal(*(x.program.state()["learner"]["weights"] for x in (agent, again)))
    recorded = episodes(agent, 1, env=adapt.make(Side, 1))[0].observations
    assert recorded.shape == (9, 36, 36, 1) and set(np.unique(recorded)) == {0, 200}


def test_compiled_iterations_have_the_bits_of_plain_python():
    agents = [PPO(adapt.make(Side, 2), n_steps=4, batch_size=8, n_epochs=1, level=x).learn(16) for x in ("eager", "O0")]
    torch.testing.assert_close(*(x.program.state()["learner"]["weights"] for x in agents))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [PPO, DQN, SAC])
def test_pictures_are_learned_from(kind):
    options = {
        PPO: {"n_steps": 64, "batch_size": 64, "n_epochs": 4},
        DQN: {
            "learning_starts": 200,
            "buffer_size": 2000,
            "learning_rate": 1e-3,
            "target_update_interval": 100,
            "gamma": 0.5,
            "exploration_fraction": 0.5,
        },
        SAC: {
            "learning_starts": 200,
            "buffer_size": 2000,
            "hidden": (64,),
            "gamma": 0.5,
            "gradient_steps": 2,
            "n_steps": 4,
            "batch_size": 64,
            "learning_rate": 1e-3,
        },
    }[kind]
    make = lambda: Side(box=kind is SAC)  # noqa: E731
    agent = kind(adapt.make(make, 4), level="eager", **options).learn(4000)
    assert agent.evaluate(4, env=adapt.make(make, 4)).mean >= 7.5
