"""LQR: a linear system with a quadratic cost, whose best return is known.

    x' = A x + B u + w,   w ~ N(0, noise^2 I),   x_0 ~ N(0, start^2 I)
    reward = -(x^T Q x + u^T R u),   limit steps

The best policy is u = -K_t x. With P = 0 after the last step, the discrete Riccati recursion gives backwards

    K = (R + B^T P B)^-1 B^T P A,   P <- Q + A^T P (A - B K)

and the best expected return is -(start^2 tr P_0 + noise^2 sum_{t = 1 .. limit} tr P_t) (Bertsekas, Dynamic Programming
and Optimal Control, section 3.1).
"""

from __future__ import annotations

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from tutti.rl.core import keys
from tutti.rl.core.env import Env, State, Step


class LQR(Env):
    """Observation: x. Action: u. The default is a mass pushed along a line, its position and velocity.

    a: (states, states). b: (states, actions). q: (states, states), symmetric, positive semidefinite. r: (actions,
    actions), symmetric, positive definite. noise, start: standard deviations. reach: what the action space says of u;
    actions beyond it are not clipped, so that the system stays linear.
    """

    def __init__(
        self,
        a=((1.0, 0.1), (0.0, 1.0)),
        b=((0.0,), (0.1,)),
        q=((1.0, 0.0), (0.0, 0.1)),
        r=((0.1,),),
        noise: float = 0.02,
        start: float = 1.0,
        limit: int = 100,
        reach: float = 10.0,
    ):
        self.a, self.b, self.q, self.r = (np.asarray(m, np.float64) for m in (a, b, q, r))
        states, actions = self.b.shape if self.b.ndim == 2 else (0, 0)
        expected = {"a": (states, states), "q": (states, states), "r": (actions, actions)}
        shapes = {name: getattr(self, name).shape for name in expected}
        if not states or shapes != expected:
            raise ValueError(
                f"LQR: b has shape {self.b.shape}, and a, q, r {shapes['a']}, {shapes['q']}, {shapes['r']}; with b of "
                "shape (states, actions), a and q must be (states, states) and r (actions, actions)"
            )
        if np.linalg.eigvalsh(self.r).min() <= 0:
            raise ValueError("LQR: r is not positive definite, so that no best action exists; add to its diagonal")
        self.noise, self.start, self.limit = noise, start, limit
        self.observation_space = spaces.Box(-np.inf, np.inf, (states,), np.float32)
        self.action_space = spaces.Box(-reach, reach, (actions,), np.float32)

    def reset(self, key: Tensor, n: int) -> tuple[State, Tensor]:
        x = self.start * keys.normal(key, (n, len(self.a)))
        return {"x": x, "t": torch.zeros(n, dtype=torch.int64, device=key.device)}, x

    def step(self, state: State, action: Tensor, key: Tensor) -> Step:
        x, u = state["x"], action.to(state["x"].dtype)
        a, b, q, r = (torch.tensor(m, dtype=x.dtype, device=x.device) for m in (self.a, self.b, self.q, self.r))
        reward = -((x @ q * x).sum(-1) + (u @ r * u).sum(-1))
        x = x @ a.T + u @ b.T + self.noise * keys.normal(key, x.shape).to(x.dtype)
        t = state["t"] + 1
        return {"x": x, "t": t}, x, reward, torch.zeros_like(t, dtype=torch.bool), self.truncated(t)

    def riccati(self) -> tuple[np.ndarray, np.ndarray]:
        """(gains K_0 .. K_{limit - 1}, costs P_0 .. P_limit), float64."""
        p = np.zeros_like(self.q)
        gains, costs = [], [p]
        for _ in range(self.limit or 0):
            k = np.linalg.solve(self.r + self.b.T @ p @ self.b, self.b.T @ p @ self.a)
            p = self.q + self.a.T @ p @ (self.a - self.b @ k)
            gains.append(k)
            costs.append(p)
        return np.stack(gains[::-1]), np.stack(costs[::-1])

    def optimal_return(self) -> float:
        """The expected return of an episode under the best policy."""
        traces = self.riccati()[1].trace(axis1=1, axis2=2)
        return float(-(self.start**2 * traces[0] + self.noise**2 * traces[1:].sum()))
