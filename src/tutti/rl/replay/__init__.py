"""Replay of experience as tensors: what is stored, and how it is sampled."""

from tutti.rl.replay.hindsight import Hindsight as Hindsight
from tutti.rl.replay.priority import Prioritized as Prioritized
from tutti.rl.replay.ring import Ring as Ring
