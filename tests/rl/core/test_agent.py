"""What all agents share: levels, files, evaluation, and errors."""

import types

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from tutti.rl import PPO, SAC, Agent, CheckpointCallback, EvalCallback, StopOnReturn, make
from tutti.rl.algorithms import algorithm
from tutti.rl.core import files, program
from tutti.rl.core.callbacks import TensorBoard, checkpoints
from tutti.rl.core.evaluate import Evaluation
from tutti.rl.core.files import equal
from tutti.rl.core.program import leaves
from tutti.rl.core.vector import Moved, VectorEnv
from tutti.rl.envs.cartpole import CartPole

SMALL = {"n_envs": 4, "n_steps": 16, "batch_size": 32, "n_epochs": 2, "hidden": (16,)}
REPLAYED = {"n_envs": 2, "n_steps": 8, "gradient_steps": 4, "hidden": (16,), "batch_size": 16, "learning_starts": 16,
            "buffer_size": 128}  # fmt: skip
CASES = {
    "PPO": ("CartPole-v1", SMALL), "A2C": ("CartPole-v1", {"n_steps": 8}), "SAC": ("Pendulum-v1", REPLAYED),
    "DQN": ("CartPole-v1", REPLAYED), "Rainbow": ("CartPole-v1", {**REPLAYED, "hidden": (16, 16)}),
    "TRPO": ("CartPole-v1", {"n_envs": 4, "n_steps": 16, "hidden": (8,)}),
}  # fmt: skip


def small(name: str = "PPO", **options):
    env, own = CASES[name]
    return algorithm(name)(env, **{"level": "eager", **own, **options})


@pytest.mark.parametrize("name", CASES)
def test_captured_iterations_have_the_bits_of_plain_python(name):
    plain, captured = small(name), small(name, level="O0")
    for agent in (plain, captured):
        agent.learn(48)
    assert equal(plain, captured)
    assert float(plain.program.state()["learner"]["progress"]) == 1.0


@pytest.mark.parametrize("name", ["PPO", "SAC"])
def test_a_run_that_was_saved_continues_bit_for_bit(name, tmp_path):
    whole = small(name)
    whole.learn(128)
    half = small(name)
    half.total = 128
    half.prepare()
    while half.num_timesteps < 64:
        half.step()
    again = Agent.load(half.save(tmp_path / "half.safetensors"), level="eager")
    assert type(again) is type(whole) and again.num_timesteps == half.num_timesteps
    again.learn(128 - again.num_timesteps)
    assert equal(whole, again) and list(whole.episodes) == list(again.episodes)


def test_replay_can_be_left_out_of_a_file(tmp_path):
    agent = small("SAC").learn(64)
    path = agent.save(tmp_path / "a", replay=False)
    assert path.stat().st_size < agent.save(tmp_path / "b").stat().st_size
    again = SAC.load(path, level="eager")
    assert int(again.program.state()["replay"]["size"]) == 0 and again.warming
    again.learn(16)
    assert not again.warming and int(again.program.state()["replay"]["size"]) == 8
    obs, policy = np.zeros(3, np.float32), SAC.load(path)
    np.testing.assert_array_equal(policy.predict(obs)[0], agent.predict(obs)[0])
    assert policy.level == "eager"


def test_files_that_are_not_an_agents(tmp_path):
    with pytest.raises(ValueError, match="there is no file"):
        Agent.load(tmp_path / "none")
    (tmp_path / "text").write_text("text")
    with pytest.raises(ValueError, match="is not a file of an agent"):
        Agent.load(tmp_path / "text")
    falling = small(learning_rate=lambda left: 1e-3 * left).save(tmp_path / "falling")
    with pytest.raises(ValueError, match="saved with a function as learning_rate"):
        Agent.load(falling)
    assert Agent.load(falling, learning_rate=1e-3, level="eager").config.learning_rate == 1e-3
    path = small().save(tmp_path / "ppo")
    with pytest.raises(ValueError, match="is a PPO, not a SAC"):
        SAC.load(path)
    with pytest.raises(ValueError, match=r"of the shape .* differs from that of the file"):
        PPO.load(path, "Acrobot-v1")


def test_seeds_and_learning_are_deterministic():
    assert equal(small(seed=3).learn(64), small(seed=3).learn(64))
    assert not equal(small(seed=3).learn(64), small(seed=4).learn(64))


def test_learning_rates_may_follow_the_progress():
    fixed, falling = small(learning_rate=0.0), small(learning_rate=lambda left: 1e-3 * left)
    first = fixed.program.state()["learner"]["weights"].clone()
    assert torch.equal(fixed.learn(64).program.state()["learner"]["weights"], first)
    falling.learn(64)  # at the start nothing of the progress is done
    assert not torch.equal(falling.program.state()["learner"]["weights"], first)
    moved = falling.program.state()["learner"]["weights"].clone()
    falling.num_timesteps = 0
    falling.total = 64
    falling.prepare()
    falling.step()  # all is done
    assert torch.equal(falling.program.state()["learner"]["weights"], moved)


def test_evaluation_counts_whole_episodes():
    """CartPole's reward is 1 a step, so that returns are lengths."""
    evaluation = small().evaluate(7)
    assert isinstance(evaluation, Evaluation) and len(evaluation.returns) == 7
    np.testing.assert_array_equal(evaluation.returns, evaluation.lengths)
    assert 5 <= evaluation.mean <= 500 and "over 7 episodes" in str(evaluation)


def test_predictions_are_actions_of_the_space():
    agent, env = small("SAC"), make("Pendulum-v1")
    one, state = agent.predict(np.zeros(3, np.float32))
    many, _ = agent.predict(np.zeros((5, 3), np.float32), deterministic=False)
    assert state is None and one.shape == (1,) and env.action_space.contains(one)
    assert many.shape == (5, 1) and len(np.unique(many)) == 5 and abs(many).max() <= 2
    with pytest.raises(ValueError, match=r"this one has the shape \(2,\)"):
        agent.predict(np.zeros(2, np.float32))


class Broken(CartPole):
    """Rewards are not numbers from the third step on."""

    def step(self, state, action, key):
        state, obs, reward, terminated, truncated = super().step(state, action, key)
        return state, obs, torch.where(state["t"] > 2, float("nan"), reward), terminated, truncated


def test_rewards_of_pure_environments_that_are_not_numbers_are_errors():
    with pytest.raises(
        ValueError, match=r"Broken: the return of an episode that ended by step \d+ is nan; `step` must"
    ):
        PPO(Broken(), level="eager", **SMALL).learn(1_000)


def test_callbacks_evaluate_save_and_end(tmp_path):
    scores = EvalCallback(every=100, episodes=2, best=tmp_path / "best")
    small().learn(400, [scores, CheckpointCallback(tmp_path, every=64, keep=2), TensorBoard(tmp_path, every=64)])
    assert [steps for steps, _ in scores.evaluations] == [128, 256, 320, 448][: len(scores.evaluations)]
    assert [int(x.stem[6:]) for x in checkpoints(tmp_path)] == [384, 448]
    assert (tmp_path / "best").exists() and list(tmp_path.glob("events*"))
    ended = small().learn(100_000, EvalCallback(every=64, episodes=1, threshold=1.0))
    assert ended.num_timesteps == 64
    seen = []
    small().learn(128, lambda agent: seen.append(agent.num_timesteps))
    assert seen == [64, 128]
    small().learn(128, lambda agent: seen.append(agent.num_timesteps) or False)
    assert seen == [64, 128, 64]
    assert small().learn(1024, StopOnReturn(1.0, episodes=5)).num_timesteps < 1024
    with pytest.raises(ValueError, match="every is 0"):
        EvalCallback(every=0)


def test_the_best_agent_of_a_run_is_replaced_by_a_better_one_only(tmp_path, monkeypatch):
    path, score = tmp_path / "best", iter([3.0, 5.0, 4.0, 4.5, 6.0, 1.0])
    monkeypatch.setattr(Agent, "evaluate", lambda self, *_, **__: Evaluation(np.array([next(score)]), np.ones(1)))
    first = small().learn(128, EvalCallback(every=64, best=path))
    assert files.about(path)["score"] == 5 and files.about(path)["num_timesteps"] == 128
    first.learn(128, EvalCallback(every=64, best=path))  # 4, 4.5, in a process of its own
    assert files.about(path)["num_timesteps"] == 128
    first.learn(64, EvalCallback(every=64, best=path))
    assert files.about(path)["score"] == 6
    small().learn(64, EvalCallback(every=64, best=path))  # another run
    assert files.about(path)["score"] == 1


@pytest.mark.parametrize(
    "name, options, size",
    [
        ("PPO", {"n_envs": 1, "n_steps": 64}, 64),
        ("PPO", {"n_envs": 2, "n_steps": 75}, 150),
        ("PPO", {"n_envs": 1, "n_steps": 257}, 257),
        ("RecurrentPPO", {"n_envs": 3, "n_steps": 64}, 192),
        ("RecurrentPPO", {"n_envs": 3, "n_steps": 512}, 512),
    ],
)
def test_a_default_batch_size_divides_the_rollout(name, options, size):
    with pytest.warns(UserWarning, match=f"batch_size is 256, which .* it is {size} now") as caught:
        agent = algorithm(name)("CartPole-v1", level="eager", **options)
    assert agent.config.batch_size == size and len(caught) == 1 and caught[0].filename == __file__
    again = algorithm(name)("CartPole-v1", level="eager", batch_size=size, **options)  # without a warning
    assert equal(agent, again) and "batch_size" in agent.constants
    with pytest.raises(ValueError, match=rf"batch_size is 256, .*; use batch_size={size}$"):
        algorithm(name)("CartPole-v1", level="eager", batch_size=256, **options)


def test_a_team_has_a_batch_size_that_divides_its_steps():
    with pytest.raises(ValueError, match=r"batch_size is 48, which does not divide the 64 steps .* batch_size=32$"):
        algorithm("COMA")("simple_spread_v3", n_envs=4, n_steps=16, batch_size=48, level="eager")


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("trained", ["CartPole-v1", "gymnasium:CartPole-v1"])
def test_agents_are_loaded_with_another_number_of_environments(trained, normalize, tmp_path):
    own = {"n_steps": 16, "n_epochs": 1, "level": "eager", "normalize_obs": normalize, "normalize_reward": normalize}
    agent = PPO(trained, n_envs=4, batch_size=64, **own).learn(64)
    path = agent.save(tmp_path / "cart")
    with pytest.warns(UserWarning, match="batch_size is 64, which does not divide the 16 rows .* it is 16 now"):
        one = PPO.load(path, env=gymnasium.make("CartPole-v1"))
    obs = np.full((3, 4), 0.1, np.float32)
    np.testing.assert_array_equal(one.predict(obs)[0], agent.predict(obs)[0])
    before, after = leaves(agent.program.state()["learner"]), leaves(one.program.state()["learner"])
    assert all(torch.equal(x, after[name]) for name, x in before.items() if not name.endswith("return"))
    assert one.n_envs == 1 and one.learn(16).num_timesteps == 80
    with pytest.raises(ValueError, match="use batch_size=16"):
        PPO.load(path, env=gymnasium.make("CartPole-v1"), batch_size=32)


def test_a_replay_of_other_environments_is_left_out(tmp_path):
    agent = small("DQN").learn(64)
    path = agent.save(tmp_path / "dqn")
    with pytest.warns(UserWarning, match="has the replay of 2 environments, and the agent has 1: it is left out"):
        one = Agent.load(path, env=gymnasium.make("CartPole-v1"))
    assert int(one.program.state()["replay"]["size"]) == 0 and one.warm_until == 64
    assert one.learn(32).num_timesteps == 96


def test_compiling_is_told(monkeypatch, capsys):
    """By `learn` with `verbose`, once."""
    monkeypatch.setattr(program.tutti, "function", lambda run, *args, **options: types.SimpleNamespace(
        fixed=lambda *args: run))  # fmt: skip
    for verbose, level, count in ((1, "O2", 1), (0, "O2", 0), (1, "O0", 0)):
        agent = small(verbose=verbose, level=level)
        agent.predict(np.zeros(4, np.float32))
        agent.learn(128)
        lines = [x for x in capsys.readouterr().out.splitlines() if "compiling" in x]
        assert len(lines) == count and all('level="O0"' in x and x.startswith("PPO: ") for x in lines)


def test_options_that_do_not_exist_or_do_not_fit():
    with pytest.raises(ValueError, match="no option 'gama'; did you mean 'gamma'"):
        small(gama=0.9)
    with pytest.raises(ValueError, match=r"batch_size is 48, which does not divide the 64 rows .*; use batch_size=32$"):
        small(batch_size=48)
    with pytest.raises(ValueError, match=r"gamma is 1.5; it must be from 0 to 1"):
        small(gamma=1.5)
    with pytest.raises(ValueError, match="normalize_reward has no effect"):
        small("SAC", normalize_reward=True)
    with pytest.raises(ValueError, match="n_envs is 0; it must be at least 1"):
        small(n_envs=0)
    with pytest.raises(ValueError, match="level 'O9' is not one of eager, O0"):
        small(level="O9")
    with pytest.raises(ValueError, match="no algorithm 'pp0'; did you mean PPO"):
        algorithm("pp0")


def test_spaces_that_do_not_suit_an_algorithm():
    with pytest.raises(ValueError, match=r"SAC needs a Box action space, and that of CartPole is Discrete\(2\)"):
        SAC("CartPole-v1", level="eager")
    with pytest.raises(ValueError, match="DQN is for one agent, and SimpleSpread has 3"):
        algorithm("DQN")("simple_spread_v3", level="eager")
    with pytest.raises(ValueError, match="env is a int"):
        PPO(3)


class Walk(VectorEnv):
    """Episodes of 5 steps on the host. The reward is the action."""

    n, name = 3, "Walk"
    observation_space, action_space = spaces.Box(-1, 1, (2,)), spaces.Discrete(2)

    def reset(self, seed=None):
        self.t = np.zeros(3, np.int64)
        return self._obs()

    def _obs(self):
        return np.stack([self.t / 5, np.ones(3)], -1).astype(np.float32)

    def step(self, action):
        self.t += 1
        last, done = self._obs(), self.t >= 5
        self.t = np.where(done, 0, self.t)
        return Moved(self._obs(), action.astype(np.float32), np.zeros(3, bool), done, last)

    def state(self):
        return self.t.copy()

    def restore(self, state):
        self.t = state.copy()
        return self._obs()


def test_environments_of_the_host(tmp_path):
    """One learns to take the action with the reward, and continues bit for bit."""
    agent = PPO(Walk(), level="eager", n_steps=20, batch_size=30, learning_rate=1e-2, gamma=0.5)
    assert agent.config.n_envs == 3
    agent.learn(1200)
    assert {length for _, length in agent.episodes} == {5.0}
    assert agent.evaluate(env=Walk()).mean == 5.0
    with pytest.raises(ValueError, match=r"Walk was not given by name: pass evaluate\(env=\)"):
        agent.evaluate()
    again = PPO.load(agent.save(tmp_path / "agent"), Walk(), level="eager")
    for x in (agent, again):
        x.learn(120)
    one, two = leaves(agent.program.state()), leaves(again.program.state())
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_gymnasiums_cartpole_is_learned_like_ours():
    """The same seeds of weights; other first states, so that only shapes and scales are equal."""
    ours, theirs = small(), PPO("gymnasium:CartPole-v1", level="eager", **SMALL)
    for agent in (ours, theirs):
        agent.learn(256)
    assert {k: x.shape for k, x in leaves(ours.program.state()["learner"]).items()} == {
        k: x.shape for k, x in leaves(theirs.program.state()["learner"]).items()}  # fmt: skip
    lengths = [np.mean([n for _, n in agent.episodes]) for agent in (ours, theirs)]
    assert min(lengths) > 10 and max(lengths) < 60


class Small(gymnasium.Env):
    observation_space, action_space = spaces.Box(-1, 1, (2,)), spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return np.zeros(2, np.float32), {}

    def step(self, action):
        return np.zeros(2, np.float32), 0.0, False, False, {}


def test_environments_of_others_are_made_by_adapt(monkeypatch):
    import tutti.rl

    assert {"PPO", "adapt", "make"} <= set(dir(tutti.rl))
    with pytest.raises(ValueError, match=r"tutti\.rl\.adapt\.make\(function, n\)"):
        tutti.rl.PPO(Small)
    assert tutti.rl.PPO(Small(), level="eager").config.n_envs == 1
    monkeypatch.setattr(Small, "action_masks", lambda self: [True, False], raising=False)
    agent = tutti.rl.PPO(tutti.rl.adapt.make(Small, 2), n_steps=8, batch_size=16, level="eager")
    with pytest.raises(ValueError, match=r"pass EvalCallback\(env=\)"):
        agent.learn(32, tutti.rl.EvalCallback(16))
    monkeypatch.setattr(Small, "action_masks", lambda self: [True, False, True])
    with pytest.raises(ValueError, match=r"the mask of instance 0 has the shape \(3,\), and there are 2 actions"):
        tutti.rl.PPO(tutti.rl.adapt.make(Small, 2), n_steps=8, batch_size=16, level="eager").learn(16)
    with pytest.raises(ValueError, match="hindsight is -1"):
        tutti.rl.DQN("BitFlip", hindsight=-1, level="eager")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nosuch": 1}, r"no option 'nosuch'\. The options are"),
        ({"n_envs": 2.5}, "n_envs is 2.5; it must be a whole number"),
        ({"normalize_obs": "yes"}, "it must be True or False"),
        ({"clip_range": lambda progress: 0.2}, "clip_range is .*; it must be a number"),
        ({"learning_rate": -1.0}, "learning_rate is -1.0; it must be at least 0"),
        ({"target_kl": "auto"}, "target_kl is 'auto'; it must be a number or None"),
    ],
)
def test_values_of_the_wrong_kind_are_errors(options, message):
    from tutti.rl import PPO

    with pytest.raises(ValueError, match=message):
        PPO("CartPole-v1", level="eager", **options)


def test_algorithms_of_users_are_loaded_by_their_class(tmp_path):
    class Mine(PPO):
        pass

    agent = Mine("CartPole-v1", level="eager", **SMALL).learn(64)
    path = agent.save(tmp_path / "mine")
    assert Mine.load(path).num_timesteps == 64
    with pytest.raises(ValueError, match=r"Mine\.load\(path\)"):
        Agent.load(path)
