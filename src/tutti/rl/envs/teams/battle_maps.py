"""Units and maps of `tutti.rl.envs.teams.battle`.

Units: multiplayer data of StarCraft II, version 4.6 (liquipedia.net/starcraft2), at the speed "faster". Maps: units,
races and episode limits of the StarCraft multi-agent challenge (Samvelyan et al. 2019).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Unit:
    """health, shield, armor, damage: points. bonus: more damage to armored units. strikes: hits of one attack.

    period: seconds between attacks. reach: range of the weapon, between the borders of units. speed: distance per
    second. radius: radius of the unit. most_cooldown: what SMAC divides cooldowns by, in game steps of 1 / 22.4 s.
    """

    health: float
    shield: float
    armor: float
    damage: float
    bonus: float
    strikes: int
    period: float
    reach: float
    speed: float
    radius: float
    armored: bool
    most_cooldown: float


UNITS = {
    "marine": Unit(45, 0, 0, 6, 0, 1, 0.61, 5.0, 3.15, 0.375, False, 15),
    "stalker": Unit(80, 80, 1, 13, 5, 1, 1.34, 6.0, 4.13, 0.625, True, 35),
    "zealot": Unit(100, 50, 1, 8, 0, 2, 0.86, 0.1, 3.15, 0.5, False, 22),
}


@dataclass(frozen=True)
class Map:
    """allies, enemies: names of units. limit: steps of an episode."""

    allies: tuple[str, ...]
    enemies: tuple[str, ...]
    limit: int


def units(**counts: int) -> tuple[str, ...]:
    return tuple(name for name, count in counts.items() for _ in range(count))


MAPS = {
    "3m": Map(units(marine=3), units(marine=3), 60),
    "8m": Map(units(marine=8), units(marine=8), 120),
    "25m": Map(units(marine=25), units(marine=25), 150),
    "5m_vs_6m": Map(units(marine=5), units(marine=6), 70),
    "8m_vs_9m": Map(units(marine=8), units(marine=9), 120),
    "10m_vs_11m": Map(units(marine=10), units(marine=11), 150),
    "2s3z": Map(units(stalker=2, zealot=3), units(stalker=2, zealot=3), 120),
    "3s5z": Map(units(stalker=3, zealot=5), units(stalker=3, zealot=5), 150),
    "3s_vs_3z": Map(units(stalker=3), units(zealot=3), 150),
    "3s_vs_5z": Map(units(stalker=3), units(zealot=5), 250),
    "2m_vs_1z": Map(units(marine=2), units(zealot=1), 150),
}
