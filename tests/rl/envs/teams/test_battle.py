"""Battle: published sizes of SMAC, rules that always hold, and fights that can be worked out by hand."""

import math

import pytest
import torch

from tutti.rl.core import keys
from tutti.rl.envs.teams.battle import Battle, start
from tutti.rl.envs.teams.battle_maps import MAPS, Map

SIZES = {  # observation, state, actions, limit: Samvelyan et al. 2019, and `get_env_info` of SMAC
    "3m": (30, 48, 9, 60),
    "8m": (80, 168, 14, 120),
    "2s3z": (80, 120, 11, 120),
    "5m_vs_6m": (55, 98, 12, 70),
    "3s5z": (128, 216, 14, 150),
    "10m_vs_11m": (105, 243, 17, 150),
}


@pytest.mark.parametrize("name", SIZES)
def test_sizes_are_those_of_smac(name):
    env = Battle(name)
    state, obs = env.reset(keys.make(0), 2)
    size, whole, actions, limit = SIZES[name]
    assert obs.shape == (2, len(env.agents), size)
    assert env.overview(state).shape == (2, whole)
    assert env.masks(state).shape == (2, len(env.agents), actions)
    assert env.limit == limit


def focus(env, state):
    """Attack the first enemy that can be attacked, else go east."""
    masks = env.masks(state)
    ranks = torch.arange(masks.shape[-1])
    attack = torch.where(masks & (ranks >= 6), masks.shape[-1] - ranks, 0).argmax(-1)
    return torch.where(masks[..., 6:].any(-1), attack, torch.where(masks[..., 0], 0, 4))


def randomly(env, state, key):
    return keys.categorical(key, torch.where(env.masks(state), 0.0, -1e9))


@pytest.mark.parametrize("name", ["3m", "2s3z", "5m_vs_6m", "2m_vs_1z"])
def test_rules_hold_in_random_fights(name):
    env, n = Battle(name), 64
    a, most = env.allies, torch.tensor(env.shield)
    state, _ = env.reset(keys.make(1), n)
    total, running = torch.zeros(n), torch.ones(n, dtype=torch.bool)
    for i in range(env.limit):
        masks = env.masks(state)
        alive = state["health"] > 0
        assert torch.equal(masks[..., 0], ~alive[:, :a])
        assert not masks[..., 1:][~alive[:, :a]].any()
        assert masks[..., 1][alive[:, :a]].all()
        assert not masks[..., 6:].any(1)[~alive[:, a:]].any()
        action = randomly(env, state, keys.make(100 + i))
        if i % 3:
            action = torch.where(
                torch.rand(n, 1, generator=torch.Generator().manual_seed(i)) < 0.7, focus(env, state), action
            )
        after, obs, reward, terminated, _ = env.step(state, action, keys.make(500 + i))
        assert (after["health"] <= state["health"]).all()
        assert (after["health"] >= 0).all()
        assert ((after["shield"] <= state["shield"]) | (after["calm"] >= 20)).all()
        assert (after["shield"] <= most).all()
        assert not after["shield"][after["health"] == 0].any()
        assert not obs[~(after["health"] > 0)[:, :a]].any()
        enemies = after["health"][:, a:] + after["shield"][:, a:]
        before = state["health"][:, a:] + state["shield"][:, a:]
        kills = ((after["health"] == 0) & alive)[:, a:].sum(-1)
        lost = (before - enemies).sum(-1) + 10 * kills + 200 * env.won(after)
        grown = (after["calm"][:, a:] >= 20).any(-1)
        torch.testing.assert_close(reward[~grown][:, 0], (lost * env.scale)[~grown], atol=1e-4, rtol=1e-4)
        over = ~((after["health"][:, :a] > 0).any(-1) & (after["health"][:, a:] > 0).any(-1))
        assert torch.equal(terminated, over)
        stay = (action == 1) | (action == 0)
        assert torch.equal(after["position"][:, :a][stay], state["position"][:, :a][stay])
        walked = (after["position"] - state["position"]).norm(dim=-1)
        assert (walked <= torch.tensor(env.pace) + 1e-5).all()
        assert not walked[~alive].any()
        total += torch.where(running, reward[:, 0], 0.0)
        running &= ~terminated
        state = after
    if name in ("3m", "5m_vs_6m"):
        assert total.max() <= 20 + 1e-4
    assert (total[env.won(state)] >= 20 - 1e-4).all()


def returns(env, policy, n):
    """(share of fights that are won, mean return)."""
    state, _ = env.reset(keys.make(2), n)
    total, won, over = torch.zeros(n), torch.zeros(n, dtype=torch.bool), torch.zeros(n, dtype=torch.bool)
    for i in range(env.limit):
        state, _, reward, terminated, _ = env.step(state, policy(env, state, keys.make(i)), keys.make(1000 + i))
        total += torch.where(over, 0.0, reward[:, 0])
        won |= env.won(state) & ~over
        over |= terminated
        if over.all():
            break
    return won.float().mean().item(), total.mean().item()


def test_focus_beats_what_is_random():
    rate, total = returns(Battle("3m"), lambda env, state, key: focus(env, state), 256)
    assert rate > 0.4
    rate, lower = returns(Battle("3m"), randomly, 256)
    assert rate < 0.02
    assert lower < 3 < 12 < total


def kite(env, state, key):
    """Shoot at the weakest where the weapon is ready, else go away from the nearest, also along the border."""
    position, a = state["position"], env.allies
    far = (position[:, a:].unsqueeze(1) - position[:, :a].unsqueeze(2)).norm(dim=-1)
    left = (state["health"] + state["shield"])[:, a:]
    far = torch.where(left.unsqueeze(1) > 0, far, 99.0)
    near, index = far.min(-1)
    masks = env.masks(state)
    weakest = (torch.where(left > 0, left, 1e6) + 0.1 * far.sum(1)).argmin(-1, keepdim=True)
    aim = 6 + torch.where(far.gather(-1, weakest.unsqueeze(1).expand(-1, a, 1)).squeeze(-1) <= 6, weakest, index)
    back = torch.where(position[:, :a, 0] < position[:, a:, 0].gather(1, index), 5, 4)
    back = torch.where(
        masks.gather(-1, back.unsqueeze(-1)).squeeze(-1), back, torch.where(position[:, :a, 1] > 16, 3, 2)
    )
    act = torch.where((state["cooldown"][:, :a] < 8) | (near > 4.5), aim, back)
    return torch.where(masks[..., 0], 0, torch.where(near <= 6, act, 4))


def test_stalkers_that_keep_their_distance_beat_zealots():
    assert returns(Battle("3s_vs_3z"), kite, 64)[0] > 0.95
    assert returns(Battle("3s_vs_3z"), lambda env, state, key: focus(env, state), 64)[0] < 0.05


def fight(allies, enemies, apart, policy):
    """Steps until one side is dead, with units in two rows that are `apart`: (steps, total reward, last state)."""
    env = Battle(Map(allies, enemies, 1000), jitter=0.0, delay=(0.0, 0.0))
    state, _ = env.reset(keys.make(0), 1)
    for i in range(len(allies)):
        state["position"][0, i] = torch.tensor([10.0, 16.0 + i])
    for i in range(len(enemies)):
        state["position"][0, len(allies) + i] = torch.tensor([10.0 + apart, 16.0 + i])
    total = 0.0
    for i in range(1000):
        state, _, reward, terminated, _ = env.step(state, policy(env, state), keys.make(1))
        total += reward[0, 0].item()
        if terminated:
            return i + 1, total, state, env
    raise AssertionError("nobody died")


def shots_in(period, shots):
    """Steps of 8 game steps until so many shots have been fired, of which the first is at once."""
    return math.floor((shots - 1) * period * 22.4 / 8) + 1


def test_marines_need_eight_shots():
    stop = lambda env, state: torch.ones(1, env.allies, dtype=torch.int64)  # noqa: E731
    steps, total, state, env = fight(("marine",), ("marine",), 4.0, stop)
    assert steps == shots_in(0.61, 8) == 12
    assert total == 0
    assert not env.won(state)

    steps, total, state, env = fight(("marine",), ("marine",), 4.0, focus)
    assert steps == 12
    assert not env.won(state)  # both die in the same step
    assert total == pytest.approx(20 * (45 + 10) / (45 + 10 + 200))

    steps, total, state, env = fight(("marine", "marine"), ("marine",), 4.0, focus)
    assert steps == shots_in(0.61, 4) == 6
    assert env.won(state)
    assert total == pytest.approx(20.0)
    assert state["health"][0].tolist() == [45 - 6 * 4, 45, 0]  # the nearest was shot at


def test_armor_dulls_and_shields_do_not():
    # 13 damage on a shield of 50, then 12 on a health of 100: the fourth shot strikes 2, of which 2 / 13 are lost
    steps, total, state, env = fight(("stalker",), ("zealot",), 2.0, focus)
    shots = 4 + math.ceil((100 - 2 * 12 / 13) / 12)
    assert shots == 13
    # a zealot strikes twice 8 on a shield of 80, then twice 7 on a health of 80: 5 + 6 attacks
    assert not env.won(state)
    assert steps == 1 + shots_in(0.86, 11)  # the zealot comes nearer in the first step
    left = 150 - total / env.scale  # damage until then
    fired = 1 + math.floor((steps - 1e-9) * 8 / (1.34 * 22.4))
    assert left == pytest.approx(100 - 2 * 12 / 13 - 12 * (fired - 4))


def test_stalkers_are_armored():
    env = Battle("3s_vs_3z")
    assert env.damage[0][0][0] == 13
    env = Battle(Map(("stalker",), ("stalker", "marine"), 10))
    assert env.damage[0] == [[18, 13]]
    assert env.dulled[0] == [[17, 13]]


def test_shields_grow_after_ten_quiet_seconds():
    env = Battle("2s3z", jitter=0.0)
    state, _ = env.reset(keys.make(0), 1)
    state["shield"] = torch.full_like(state["shield"], 10.0)
    state["position"] = torch.cat([torch.zeros(1, 5, 2), torch.full((1, 5, 2), 31.0)], 1)
    stop = torch.ones(1, 5, dtype=torch.int64)
    seen = []
    for _ in range(25):
        state = env.step(state, stop, keys.make(1))[0]
        state["position"] = torch.cat([torch.zeros(1, 5, 2), torch.full((1, 5, 2), 31.0)], 1)
        seen.append(state["shield"][0, 0].item())
    assert seen == [10.0] * 19 + [11.0, 12.0, 13.0, 14.0, 15.0, 16.0]


def test_allies_of_one_kind_can_be_exchanged():
    env, n, order = Battle("5m_vs_6m", delay=(0.0, 0.0)), 2048, torch.tensor([3, 0, 4, 1, 2])
    units = torch.cat([order, torch.arange(5, 11)])
    state, _ = env.reset(keys.make(4), n)
    generator = torch.Generator().manual_seed(5)
    state["position"] = torch.rand(n, 11, 2, generator=generator) * 10 + 10
    state["health"] = (torch.rand(n, 11, generator=generator) * 60 - 15).clamp(0, 45)
    state["cooldown"] = torch.rand(n, 11, generator=generator) * 15
    other = {k: x[:, units] if x.shape[1:2] == (11,) else x for k, x in state.items()}
    action = randomly(env, state, keys.make(6))
    state, obs, reward, _, _ = env.step(state, action, keys.make(7))
    other, seen, again, _, _ = env.step(other, action[:, order], keys.make(7))
    assert reward.max() > 1
    torch.testing.assert_close(reward, again)
    for name in ("position", "health", "cooldown"):
        torch.testing.assert_close(state[name][:, units], other[name])
    own = 4 + 6 * 5  # moves and enemies; allies come in another order
    torch.testing.assert_close(obs[:, order, :own], seen[..., :own])
    torch.testing.assert_close(obs[:, order, -1], seen[..., -1])


def test_observations_by_hand():
    env = Battle(Map(("marine", "marine"), ("zealot",), 10), jitter=0.0)
    state, _ = env.reset(keys.make(0), 1)
    state["position"] = torch.tensor([[[10.0, 31.5], [13.0, 27.5], [16.0, 31.5]]])
    state["health"] = torch.tensor([[45.0, 9.0, 50.0]])
    state["shield"] = torch.tensor([[0.0, 0.0, 25.0]])
    obs = env.observe(state)[0]
    moves, enemy, ally, own = [0, 1, 1, 1], [1, 6 / 9, 6 / 9, 0, 0.5, 0.5], [1, 5 / 9, 3 / 9, -4 / 9, 0.2], [1]
    torch.testing.assert_close(obs[0], torch.tensor([*moves, *enemy, *ally, *own]))
    moves, enemy, ally, own = [1] * 4, [1, 5 / 9, 3 / 9, 4 / 9, 0.5, 0.5], [1, 5 / 9, -3 / 9, 4 / 9, 1], [0.2]
    torch.testing.assert_close(obs[1], torch.tensor([*moves, *enemy, *ally, *own]))
    assert env.masks(state)[0].int().tolist() == [[0, 1, 0, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1, 1]]
    state["health"] = torch.tensor([[45.0, 0.0, 50.0]])
    obs = env.observe(state)[0]
    assert not obs[1].any()
    assert not obs[0, 10:15].any()
    whole = env.overview({**state, "cooldown": torch.tensor([[7.5, 3.0, 1.0]])})[0]
    expected = [1, 0.5, -6 / 32, 15.5 / 32, 0, 0, 0, 0, 0.5, 0, 15.5 / 32, 0.5, *[0] * 14]
    torch.testing.assert_close(whole, torch.tensor(expected))


@pytest.mark.parametrize(
    ("health", "won"),
    [([1, 0, 0, 0, 0, 0], True), ([0, 0, 0, 0, 0, 0], False), ([1, 1, 1, 1, 0, 0], False), ([0, 0, 0, 1, 0, 0], False),
     ([0, 0, 0, 0, 0, 1], False), ([0, 0, 1, 0, 0, 0], True)],
)  # fmt: skip
def test_a_fight_is_won_when_an_ally_is_left_and_no_enemy(health, won):
    assert Battle("3m").won({"health": torch.tensor([health]).float()}).tolist() == [won]


@pytest.mark.parametrize(("action", "way"), [(2, (0, 1)), (3, (0, -1)), (4, (1, 0)), (5, (-1, 0))])
def test_allies_go_north_south_east_and_west(action, way):
    env = Battle("3m")
    state, _ = env.reset(keys.make(0), 1)
    after = env.step(state, torch.full((1, 3), action), keys.make(1))[0]
    gone = (after["position"] - state["position"])[0, :3]
    assert torch.equal(gone.sign(), torch.tensor(way).float().expand(3, 2))


def test_units_start_in_columns_of_five_about_their_middle():
    places = [start(i, 7, (10.0, 20.0)) for i in range(7)]
    assert places[:5] == [(9.5, 18.0), (9.5, 19.0), (9.5, 20.0), (9.5, 21.0), (9.5, 22.0)]
    assert places[5:] == [(10.5, 18.0), (10.5, 19.0)] and start(0, 1, (3.0, 4.0)) == (3.0, 4.0)


def test_unknown_maps_are_named():
    with pytest.raises(ValueError, match="no map '2s4z'; did you mean '2s3z'"):
        Battle("2s4z")
    assert all(Battle(name).limit == plan.limit for name, plan in MAPS.items())
