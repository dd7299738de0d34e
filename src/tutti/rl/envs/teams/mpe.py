"""Four scenarios of the multi-agent particle environments (Lowe et al. 2017), as in the package `mpe2`."""

from __future__ import annotations

import torch
from torch import Tensor

from tutti.rl.core.env import State
from tutti.rl.envs.teams.particles import MOVES, Around, Body, Particles, others, padded


class SimpleSpread(Particles):
    """`simple_spread_v3`: as many agents as landmarks shall cover these, without collisions.

    Observation: own velocity and position, landmarks and others relative to the agent, and zeros for what others say.
    Reward: (1 - local) * -(distances of the landmarks from the agents nearest to them) + local * -(own collisions).
    """

    def __init__(self, count: int = 3, local: float = 0.5, continuous: bool = False):
        if count < 1 or not 0 <= local <= 1:
            raise ValueError(
                f"SimpleSpread: count is {count} and local {local}; they must be at least 1, and in [0, 1]"
            )
        agents = {f"agent_{i}": Body(0.15, collides=True) for i in range(count)}
        width = 4 + 2 * count + 4 * (count - 1)
        super().__init__(agents, (Body(0.05),) * count, (width,) * count, continuous)
        self.local = local

    def observe(self, state: State, around: Around) -> Tensor:
        seen = torch.cat([state["velocity"], state["position"], *around.seen()], -1)
        return padded(seen, self.widths[0])

    def reward(self, state: State, around: Around) -> Tensor:
        count = len(self.agents)
        far = around.distance[:, :, count:].amin(1).sum(-1, keepdim=True)
        collisions = self.touching(around).sum(-1).to(far.dtype)
        return -(1 - self.local) * far - self.local * collisions


class SimpleTag(Particles):
    """`simple_tag_v3`: slow predators chase faster prey between obstacles.

    Observation: own velocity and position, obstacles and others relative to the agent, velocities of other prey.
    Reward: 10 for all predators for each contact of a predator with prey; prey pays 10 for it, and for leaving the
    square of half width 0.9.

    scripted: prey is no agent, and flees from predators, more from those that are near, and from the border.
    """

    def __init__(
        self,
        predators: int = 3,
        prey: int = 1,
        obstacles: int = 2,
        scripted: bool = False,
        continuous: bool = False,
    ):
        if min(predators, prey) < 1 or obstacles < 0:
            raise ValueError(
                f"SimpleTag: {predators} predators, {prey} prey, {obstacles} obstacles; there must be at least one "
                "predator and one prey, and no negative number of obstacles"
            )
        chasing, fleeing = Body(0.075, True, 3.0, 1.0), Body(0.05, True, 4.0, 1.3)
        agents = {f"adversary_{i}": chasing for i in range(predators)} | {f"agent_{i}": fleeing for i in range(prey)}
        width = 4 + 2 * obstacles + 2 * (predators + prey - 1) + 2 * prey
        widths = (width,) * predators + (width - 2,) * prey
        super().__init__(agents, (Body(0.2, True),) * obstacles, widths, continuous, spread=0.9)
        self.predators, self.scripted = predators, scripted
        if scripted:
            self.agents, self.widths = self.agents[:predators], widths[:predators]

    def move(self, state: State, action: Tensor) -> State:
        push = self.pushes(action, state["position"].dtype)
        return self.drive(state, torch.cat([push, self.flee(state)], 1) if self.scripted else push)

    def flee(self, state: State) -> Tensor:
        """Directions of the prey, of length 1, (n, prey, 2)."""
        chasing, prey = state["position"].split([self.predators, len(self.movers) - self.predators], 1)
        apart = prey.unsqueeze(2) - chasing.unsqueeze(1)
        away = (apart / (apart.square().sum(-1, keepdim=True) + 1e-6)).sum(2)
        back = -20 * prey.sign() * (prey.abs() - 0.8).clamp(min=0)
        return torch.nn.functional.normalize(away + back, dim=-1)

    def observe(self, state: State, around: Around) -> Tensor:
        velocity, p = state["velocity"], self.predators
        seen = torch.cat([velocity, state["position"], *around.seen()], -1)
        prey = velocity[:, p:]
        of_predators = torch.cat([seen[:, :p], prey.flatten(1).unsqueeze(1).expand(-1, p, -1)], -1)
        if self.scripted:
            return of_predators
        among = others(prey.unsqueeze(1).expand(-1, prey.shape[1], -1, -1)).flatten(2)
        of_prey = padded(torch.cat([seen[:, p:], among], -1), self.widths[0])
        return torch.cat([of_predators, of_prey], 1)

    def reward(self, state: State, around: Around) -> Tensor:
        p, count = self.predators, len(self.movers)
        caught = 10.0 * self.touching(around)[:, :p, p:count].sum(1).to(state["position"].dtype)  # (n, prey)
        of_predators = caught.sum(-1, keepdim=True).expand(-1, p)
        if self.scripted:
            return of_predators
        out = state["position"][:, p:].abs()
        fine = torch.where(out < 1, 10 * (out - 0.9).clamp(min=0), (2 * out - 2).exp().clamp(max=10))
        return torch.cat([of_predators, -caught - fine.sum(-1)], 1)


class SimpleAdversary(Particles):
    """`simple_adversary_v3`: agents stay near the goal, and keep an adversary who does not know it away from there.

    Observation: the goal (not for the adversary), landmarks and others, all relative to the agent. Reward of the
    adversary: -distance from the goal. Of all others: the adversary's distance - that of the nearest of them.

    state["goal"]: which landmark it is, int64 (n,).
    """

    def __init__(self, count: int = 2, continuous: bool = False):
        if count < 1:
            raise ValueError(f"SimpleAdversary: count is {count}; there must be at least one agent")
        names = ["adversary_0", *(f"agent_{i}" for i in range(count))]
        widths = (4 * count, *(4 * count + 2 for _ in range(count)))
        super().__init__({name: Body(0.15) for name in names}, (Body(0.08),) * count, widths, continuous)

    def begin(self, u: Tensor) -> State:
        return {"goal": (u * len(self.landmarks)).long()}

    def observe(self, state: State, around: Around) -> Tensor:
        seen = torch.cat(around.seen(), -1)
        goal = goal_of(state).unsqueeze(1) - state["position"]
        good = torch.cat([goal, seen], -1)[:, 1:]
        return torch.cat([padded(seen[:, :1], self.widths[-1]), good], 1)

    def reward(self, state: State, around: Around) -> Tensor:
        distance = (goal_of(state).unsqueeze(1) - state["position"]).square().sum(-1).sqrt()
        adversary = distance[:, :1]
        good = adversary - distance[:, 1:].amin(-1, keepdim=True)
        return torch.cat([-adversary, good.expand(-1, len(self.agents) - 1)], 1)


COLORS = ((0.65, 0.15, 0.15), (0.15, 0.65, 0.15), (0.15, 0.15, 0.65))


class SimpleSpeakerListener(Particles):
    """`simple_speaker_listener_v4`: a speaker, who cannot move, tells a listener to which of three landmarks to go.

    Observation of the speaker: the color of the goal (3). Of the listener: own velocity, landmarks relative to it, and
    what was said last (3). Action of the speaker: which of three symbols it says, or three numbers; others are masked
    (`masks`), and have no effect if continuous. Reward of both: -(distance of the listener from the goal)^2.

    state["goal"]: which landmark it is, int64 (n,). state["said"]: (n, 3).
    """

    def __init__(self, continuous: bool = False):
        agents = {"speaker_0": Body(0.075, accel=0.0), "listener_0": Body(0.075)}
        super().__init__(agents, (Body(0.04),) * 3, (3, 11), continuous)

    def begin(self, u: Tensor) -> State:
        return {"goal": (u * 3).long(), "said": torch.zeros_like(u).unsqueeze(-1).repeat(1, 3)}

    def move(self, state: State, action: Tensor) -> State:
        dtype, said = state["said"].dtype, action[:, 0]
        if self.continuous:
            said = said[:, :3].to(dtype).clamp(0.0, 1.0)
        else:
            said = (said.unsqueeze(-1) == torch.arange(3, device=said.device)).to(dtype)
        return {**super().move(state, action), "said": said}

    def observe(self, state: State, around: Around) -> Tensor:
        colors = torch.tensor(COLORS, dtype=state["position"].dtype, device=state["position"].device)
        speaker = padded(colors[state["goal"]], 11)
        landmarks = (state["landmarks"] - state["position"][:, 1:]).flatten(1)
        return torch.stack([speaker, torch.cat([state["velocity"][:, 1], landmarks, state["said"]], -1)], 1)

    def reward(self, state: State, around: Around) -> Tensor:
        far = (goal_of(state) - state["position"][:, 1]).square().sum(-1, keepdim=True)
        return -far.expand(-1, 2)

    def masks(self, state: State) -> Tensor | None:
        if self.continuous:
            return None
        possible = torch.tensor([[True] * 3 + [False] * 2, [True] * MOVES], device=state["t"].device)
        return possible.expand(len(state["t"]), 2, MOVES)


def goal_of(state: State) -> Tensor:
    """The place of the goal, (n, 2)."""
    chosen = state["goal"].reshape(-1, 1, 1).expand(-1, 1, 2)
    return state["landmarks"].gather(1, chosen).squeeze(1)
