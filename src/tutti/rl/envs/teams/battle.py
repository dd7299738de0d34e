"""Battle: small fights of StarCraft II units, in the form of the multi-agent challenge SMAC (Samvelyan et al. 2019).

Each agent commands one unit and sees what is near. Sizes and contents of observations, of the state and of actions,
masks and rewards are those of SMAC, and damage, armor, shields, ranges, speeds and cooldowns are those of the game. It
is not the game: what differs is

- One step is 8 game steps (0.357 s) at once. A unit fires at most once in it, at the time when its cooldown ends.
- Units have no bodies: they stand on each other and pass through each other. The field is open, 32 x 32.
- Targets within weapon range at the beginning of a step can be hit in it. All shots of a step strike together, so that
  units can kill each other. Hits that break a shield lose armor in the share that strikes health.
- `stop` does nothing, where units of the game fire by themselves.
- Enemies go to the start of the allies, and attack the nearest unit on the way that is in their weapon's range + 0.5 or
  within 5. Who has arrived goes for the nearest unit anywhere. They do not focus.
- Units start in two columns, 14 apart, moved by up to `jitter`; delays between shots vary as in the game.
- Shields that regenerate do not change the reward, where SMAC pays for them.
"""

from __future__ import annotations

import difflib

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from tutti.rl.core import keys
from tutti.rl.core.env import Env, State, Step
from tutti.rl.envs.canvas import BLUE, GRAY, GREEN, RED, Canvas
from tutti.rl.envs.teams.battle_maps import MAPS, UNITS, Map
from tutti.rl.envs.teams.particles import others

SECOND, TICKS = 22.4, 8  # game steps of a second and of an environment step
SIGHT, SHOOT, STRIDE = 9.0, 6.0, 2.0  # how far units see, may be told to attack, and are told to go
FIELD = 32.0
CLOSE = 1e-3  # what rounding leaves of a way into range
NOTICE, SCAN = 0.5, 5.0  # how much further than their weapons enemies look for targets, and how far at least
STARTS = (9.0, 16.0), (23.0, 16.0)
KILL, WIN, MAX_REWARD = 10.0, 200.0, 20.0  # rewards, and what they are scaled to
CALM, REGROWTH = 20, 1.0  # steps without damage until shields grow, and by how much (10 s, 2 / s at normal speed)
FIRST = 6  # the action that attacks enemy 0; before: none, stop, north, south, east, west


class Battle(Env):
    """Action: 0 none (dead units only), 1 stop, 2 to 5 go north, south, east, west, 6 + k attack enemy k.

    Observation: which moves are possible (4); for each enemy in sight, whether it can be attacked, its distance,
    relative x and y, health, shield, type; for each ally in sight, 1, distance, relative x and y, health, shield,
    type; own health, shield, type. Shields only where the race has them, types only where a side has several. Dead
    units see zeros, and are seen as zeros. `overview` is SMAC's state.

    Reward, the same for all agents: damage, 10 for each kill and 200 for the victory, scaled so that their sum is at
    most 20 (where enemies have no shields that regenerate). Terminates when one side is dead.

    state["position"]: positions of allies, then of enemies, (n, units, 2). state["health"], state["shield"],
    state["cooldown"] (game steps): (n, units). state["calm"]: steps since the last damage, int64 (n, units).
    state["last"]: actions, int64 (n, agents).
    """

    def __init__(self, plan: str | Map = "3m", jitter: float = 0.5, delay: tuple[float, float] = (-1.0, 2.0)):
        """plan: a name in `battle_maps.MAPS`, or a map. delay: least and most added to a cooldown, in game steps."""
        if isinstance(plan, str) and plan not in MAPS:
            near = difflib.get_close_matches(plan, MAPS, 1, 0.0)[0]
            raise ValueError(f"Battle: there is no map {plan!r}; did you mean {near!r}? Maps are {', '.join(MAPS)}")
        self.map, plan = (plan, MAPS[plan]) if isinstance(plan, str) else ("custom", plan)
        self.jitter, self.delay = jitter, delay
        self.build(plan)

    def build(self, plan: Map) -> None:
        self.allies, self.enemies, self.limit = len(plan.allies), len(plan.enemies), plan.limit
        units = [UNITS[unit] for unit in plan.allies + plan.enemies]
        self.ally_shields = any(unit.shield for unit in units[: self.allies])
        self.enemy_shields = any(unit.shield for unit in units[self.allies :])
        kinds = sorted(set(plan.allies + plan.enemies))
        several = max(len(set(plan.allies)), len(set(plan.enemies))) > 1
        self.kinds = [[float(unit == kind) for kind in kinds if several] for unit in plan.allies + plan.enemies]
        self.health, self.shield = [unit.health for unit in units], [unit.shield for unit in units]
        self.radius = [unit.radius for unit in units]
        self.period = [unit.period * SECOND for unit in units]
        self.most_cooldown = [unit.most_cooldown for unit in units]
        self.pace = [unit.speed * TICKS / SECOND for unit in units]
        ours, theirs = units[: self.allies], units[self.allies :]

        def table(entry):  # allies x enemies, enemies x allies
            return [[entry(a, b) for b in theirs] for a in ours], [[entry(a, b) for b in ours] for a in theirs]

        self.reach = table(lambda a, b: a.reach + a.radius + b.radius)
        self.notice = [[max(a.reach + NOTICE, SCAN) + a.radius + b.radius for b in ours] for a in theirs]
        self.damage = table(lambda a, b: a.strikes * (a.damage + a.bonus * b.armored))
        self.dulled = table(lambda a, b: a.strikes * max(a.damage + a.bonus * b.armored - b.armor, 0.5))
        self.start = [start(i, self.allies, STARTS[0]) for i in range(self.allies)]
        self.start += [start(i, self.enemies, STARTS[1]) for i in range(self.enemies)]
        self.scale = MAX_REWARD / (self.enemies * KILL + WIN + sum(unit.health + unit.shield for unit in theirs))

        self.agents = tuple(f"{unit}_{i}" for i, unit in enumerate(plan.allies))
        self.actions = FIRST + self.enemies
        types = len(self.kinds[0])
        own, enemy = 1 + self.ally_shields + types, 5 + self.enemy_shields + types
        width = 4 + self.enemies * enemy + (self.allies - 1) * (4 + own) + own
        self.observation_space = spaces.Box(-1.0, 1.0, (width,), np.float32)
        self.action_space = spaces.Discrete(self.actions)

    @property
    def name(self) -> str:
        return f"Battle-{self.map}"

    def reset(self, key: Tensor, n: int) -> tuple[State, Tensor]:
        count = self.allies + self.enemies
        moved = keys.uniform(key, (n, count, 2), -self.jitter, self.jitter)
        position = torch.tensor(self.start, device=key.device) + moved
        zeros = torch.zeros(n, count, dtype=torch.int64, device=key.device)
        state = {
            "position": position,
            "health": of(self.health, position).expand(n, count),
            "shield": of(self.shield, position).expand(n, count),
            "cooldown": zeros.float(),
            "calm": zeros,
            "last": zeros[:, : self.allies],
            "t": zeros[:, 0],
        }
        return state, self.observe(state)

    def step(self, state: State, action: Tensor, key: Tensor) -> Step:
        position, health, shield = state["position"], state["health"], state["shield"]
        a, alive = self.allies, health > 0
        distance = across(position, a, slice(a, None))[1]

        possible = self.possible(state, distance).gather(-1, action.unsqueeze(-1)).squeeze(-1) & alive[:, :a]
        attacks, target = possible & (action >= FIRST), (action - FIRST).clamp(min=0)
        east = (action == 4).to(health.dtype) - (action == 5).to(health.dtype)
        north = (action == 2).to(health.dtype) - (action == 3).to(health.dtype)
        going = torch.stack([east, north], -1) * (STRIDE * possible).unsqueeze(-1)
        way, reached = self.approach(0, position[:, :a], position[:, a:], target)
        ours = torch.where(attacks.unsqueeze(-1), way, going)

        near, nearest = torch.where(alive[:, :a, None], distance, 2 * FIELD).min(1)
        home = of(STARTS[0], position) - position[:, a:]
        chases = alive[:, a:] & ((near < entry(self.notice, nearest, a, near)) | (length(home) < 1))
        way, touched = self.approach(1, position[:, a:], position[:, :a], nearest)
        theirs = torch.where(chases.unsqueeze(-1), way, home)

        way = torch.cat([ours, theirs], 1)
        far = length(way)
        step = torch.minimum(far, of(self.pace, far)) / far.clamp(min=1e-9) * alive
        position = (position + way * step.unsqueeze(-1)).clamp(0.0, FIELD)

        fires = torch.cat([attacks & reached, chases & touched], 1) & (state["cooldown"] < TICKS)
        wait = of(self.period, health) + keys.uniform(key, fires.shape, *self.delay).to(health.dtype)
        cooldown = state["cooldown"] - TICKS
        cooldown = torch.where(fires, cooldown + wait, cooldown.clamp(min=0.0))
        hits = one_hot(target, self.enemies) & fires[:, :a, None]
        blows = one_hot(nearest, a) & fires[:, a:, None]
        after, left = self.strike(health, shield, hits, blows)

        damaged = after + left < health + shield
        calm = torch.where(damaged, 0, state["calm"] + 1)
        dealt = (health + shield - after - left)[:, a:].sum(-1)
        grown = torch.minimum(left + REGROWTH, of(self.shield, left))
        left = torch.where((calm >= CALM) & (after > 0), grown, left)
        kills = ((after <= 0) & alive)[:, a:].sum(-1)
        state = {
            "position": position,
            "health": after,
            "shield": left,
            "cooldown": cooldown,
            "calm": calm,
            "last": action,
            "t": state["t"] + 1,
        }
        ally, enemy = (after[:, :a] > 0).any(-1), (after[:, a:] > 0).any(-1)
        reward = self.scale * (dealt + KILL * kills + WIN * (ally & ~enemy))
        reward = reward.unsqueeze(-1).expand(-1, a)
        return state, self.observe(state), reward, ~(ally & enemy), self.truncated(state["t"])

    def approach(self, side: int, own: Tensor, opponents: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """(moves towards targets until they are in range, which targets are in range): (n, own, 2), bool (n, own)."""
        apart = opponents.gather(1, target.unsqueeze(-1).expand(-1, -1, 2)) - own
        distance = length(apart)
        over = distance - entry(self.reach[side], target, opponents.shape[1], distance)
        return apart * (over.clamp(min=0.0) / distance.clamp(min=1e-9)).unsqueeze(-1), over <= CLOSE

    def strike(self, health: Tensor, shield: Tensor, hits: Tensor, blows: Tensor) -> tuple[Tensor, Tensor]:
        """Health and shields after all shots of a step. Armor dulls what strikes health."""
        sums = []
        for tables in (self.damage, self.dulled):
            ours = (hits * of(tables[0], health)).sum(1)
            theirs = (blows * of(tables[1], health)).sum(1)
            sums.append(torch.cat([theirs, ours], 1))
        damage, dulled = sums
        absorbed = torch.minimum(shield, damage)
        through = dulled * (damage - absorbed) / damage.clamp(min=1e-9)
        after = (health - through).clamp(min=0.0)
        return after, torch.where(after > 0, shield - absorbed, 0.0)

    def won(self, state: State) -> Tensor:
        """Whether all enemies are dead and an ally is not, bool (n,)."""
        alive = state["health"] > 0
        return alive[:, : self.allies].any(-1) & ~alive[:, self.allies :].any(-1)

    def masks(self, state: State) -> Tensor:
        return self.possible(state, across(state["position"], self.allies, slice(self.allies, None))[1])

    def possible(self, state: State, distance: Tensor) -> Tensor:
        """`masks`, of the distances from allies to enemies."""
        a, alive = self.allies, state["health"] > 0
        own = alive[:, :a, None]
        attacks = (distance <= SHOOT) & alive[:, None, a:] & own
        return torch.cat([~own, own, self.free(state["position"][:, :a]) & own, attacks], -1)

    def free(self, here: Tensor) -> Tensor:
        """Mask of possible moves: north, south, east, west. A point half a stride ahead must be in the field."""
        up, down = here + STRIDE / 2 < FIELD, here - STRIDE / 2 >= 0
        return torch.stack([up[..., 1], down[..., 1], up[..., 0], down[..., 0]], -1)

    def features(self, state: State) -> tuple[list[Tensor], list[Tensor]]:
        """Health, shield and types of allies and of enemies, as far as the map has them: (n, allies), (n, enemies)."""
        a, health = self.allies, state["health"]
        full = health / of(self.health, health)
        shield = state["shield"] / of(self.shield, health).clamp(min=1.0)
        kinds = [of(column, health) * (health > 0) for column in zip(*self.kinds, strict=True)]
        ally = [full, *([shield] if self.ally_shields else []), *kinds]
        enemy = [full, *([shield] if self.enemy_shields else []), *kinds]
        return [x[:, :a] for x in ally], [x[:, a:] for x in enemy]

    def observe(self, state: State) -> Tensor:
        position, a = state["position"], self.allies
        alive = state["health"] > 0
        (x, y), distance = across(position, a, slice(None))
        seen = (distance < SIGHT) & alive[:, :a, None] & alive.unsqueeze(1)
        where = torch.stack([distance, x, y], 1) / SIGHT * seen.unsqueeze(1)  # (n, 3, allies, units)
        ally, enemy = self.features(state)
        parts = [seen[..., :a].unsqueeze(1), where[..., :a], torch.stack(ally, 1).unsqueeze(2) * seen[:, None, :, :a]]
        allies = others(torch.cat(parts, 1).permute(0, 2, 3, 1)).flatten(2)
        shoot = (seen & (distance <= SHOOT))[..., a:].unsqueeze(1)
        parts = [shoot, where[..., a:], torch.stack(enemy, 1).unsqueeze(2) * seen[:, None, :, a:]]
        enemies = torch.cat(parts, 1).permute(0, 2, 3, 1).flatten(2)
        free = self.free(position[:, :a]) & alive[:, :a, None]
        return torch.cat([free, enemies, allies, torch.stack(ally, -1)], -1)

    def alive(self, state: State) -> Tensor:
        return state["health"][:, : self.allies] > 0

    def draw(self, state: State, i: int) -> np.ndarray:
        """Allies are blue, enemies red. A bar shows health, a ring the shield."""
        canvas = Canvas(0.0, 0.0, FIELD, FIELD, 400)
        for k, (x, y) in enumerate(state["position"][i].tolist()):
            health = float(state["health"][i, k]) / self.health[k]
            if health > 0:
                shield = float(state["shield"][i, k]) / max(self.shield[k], 1.0)
                canvas.disk(x, y, self.radius[k], BLUE if k < self.allies else RED)
                canvas.ring(x, y, self.radius[k] + 0.1, 0.15 * shield, GRAY)
                canvas.line((x - 0.6, y + 0.9), (x - 0.6 + 1.2 * health, y + 0.9), 0.2, GREEN)
        return canvas.picture()

    def overview(self, state: State) -> Tensor:
        """SMAC's state: health, cooldown, x, y, shield, type of allies; without cooldown of enemies; last actions."""
        a, position = self.allies, state["position"]
        place = (position - FIELD / 2) / FIELD * (state["health"] > 0).unsqueeze(-1)
        x, y = place.unbind(-1)
        cooldown = state["cooldown"] / of(self.most_cooldown, position) * (state["health"] > 0)
        ally, enemy = self.features(state)
        ours = torch.stack([ally[0], cooldown[:, :a], x[:, :a], y[:, :a], *ally[1:]], -1)
        theirs = torch.stack([enemy[0], x[:, a:], y[:, a:], *enemy[1:]], -1)
        last = one_hot(state["last"], self.actions) & (state["t"] > 0)[:, None, None]
        return torch.cat([ours.flatten(1), theirs.flatten(1), last.to(position.dtype).flatten(1)], -1)


def start(i: int, count: int, middle: tuple[float, float]) -> tuple[float, float]:
    """The place of unit i in columns of up to five."""
    rows = min(count, 5)
    return middle[0] + i // rows - (count - 1) // rows / 2, middle[1] + i % rows - (rows - 1) / 2


def of(numbers, like: Tensor) -> Tensor:
    return torch.tensor(numbers, dtype=like.dtype, device=like.device)


def entry(table: list[list[float]], column: Tensor, columns: int, like: Tensor) -> Tensor:
    """Entries of a table at row i and column[:, i]: (n, rows)."""
    rows = torch.arange(len(table), device=column.device)
    return of(table, like).flatten()[rows * columns + column]


def length(x: Tensor) -> Tensor:
    return torch.hypot(x[..., 0], x[..., 1])


def across(position: Tensor, allies: int, to: slice) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """(x, y) and the distance from allies to units, each (n, allies, units)."""
    x, y = position.unbind(-1)
    x, y = x[:, to].unsqueeze(1) - x[:, :allies].unsqueeze(2), y[:, to].unsqueeze(1) - y[:, :allies].unsqueeze(2)
    return (x, y), torch.hypot(x, y)


def one_hot(index: Tensor, size: int) -> Tensor:
    """bool (..., size); none where an index is outside."""
    return index.unsqueeze(-1) == torch.arange(size, device=index.device)
