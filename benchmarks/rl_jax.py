"""PPO and DQN in JAX, as PureJaxRL writes them: whole training iterations with gymnax environments in one `jit`.

`rl_peers.py` runs it. Networks, losses, numbers of rows and optimizers are those of the other contenders.
"""

import functools
from itertools import pairwise

import gymnax
import jax
import jax.numpy as jnp
import optax


def layers(key, sizes, gains=None):
    """Weights of a perceptron: orthogonal with gains, else uniform as PyTorch draws them."""
    weights = []
    for i, (a, b) in enumerate(pairwise(sizes)):
        key, one, two = jax.random.split(key, 3)
        if gains:
            weights.append((jax.nn.initializers.orthogonal(gains[i])(one, (a, b)), jnp.zeros(b)))
        else:
            draw = functools.partial(jax.random.uniform, minval=-(a**-0.5), maxval=a**-0.5)
            weights.append((draw(one, (a, b)), draw(two, (b,))))
    return weights


def run(weights, x, activation):
    for i, (w, b) in enumerate(weights):
        x = x @ w + b
        x = activation(x) if i < len(weights) - 1 else x
    return x


class Training:
    """A jitted iteration, and its state."""

    def __init__(self, case: dict):
        self.case = case
        self.env, self.params = gymnax.make(case["env"])
        self.n = case["n_envs"]
        space = self.env.action_space(self.params)
        self.discrete = hasattr(space, "n")
        self.width = space.n if self.discrete else space.shape[0]
        self.size = self.env.observation_space(self.params).shape[0]
        self.activation = {"tanh": jnp.tanh, "relu": jax.nn.relu}[case["activation"]]
        key, self.key = jax.random.split(jax.random.PRNGKey(0))
        self.obs, self.envs = jax.vmap(self.env.reset, (0, None))(jax.random.split(key, self.n), self.params)
        self.begin()
        self.each = self.n * self.steps
        self.compiled = jax.jit(self.iterate, donate_argnums=0)

    def __call__(self, steps: int) -> int:
        count = -(-steps // self.each)
        for _ in range(count):
            self.state = self.compiled(self.state)
        jax.block_until_ready(self.state)
        return count * self.each

    def step(self, key, envs, action):
        move = jax.vmap(self.env.step, (0, 0, 0, None))
        obs, envs, reward, terminated, truncated, _ = move(jax.random.split(key, self.n), envs, action, self.params)
        return obs, envs, reward, terminated | truncated


class PPO(Training):
    def begin(self):
        c, options = self.case, self.case["jax"]
        self.steps, self.epochs, self.lam = options["n_steps"], options["n_epochs"], options["gae_lambda"]
        self.adam = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(c["lr"], eps=1e-5))
        one, two, self.key = jax.random.split(self.key, 3)
        root = 2**0.5
        weights = {
            "actor": layers(one, [self.size, *c["hidden"], self.width], [root] * len(c["hidden"]) + [0.01]),
            "critic": layers(two, [self.size, *c["hidden"], 1], [root] * len(c["hidden"]) + [1.0]),
        }
        if not self.discrete:
            weights["log_std"] = jnp.zeros(self.width)
        self.state = (weights, self.adam.init(weights), self.envs, self.obs, self.key)

    def policy(self, weights, obs):
        return run(weights["actor"], obs, self.activation), run(weights["critic"], obs, self.activation)[..., 0]

    def log_prob(self, weights, out, action):
        if self.discrete:
            return jnp.take_along_axis(jax.nn.log_softmax(out), action[..., None], -1)[..., 0]
        z = (action - out) * jnp.exp(-weights["log_std"])
        return (-0.5 * z**2 - weights["log_std"] - 0.5 * jnp.log(2 * jnp.pi)).sum(-1)

    def iterate(self, state):
        c = self.case
        weights, adam, envs, obs, key = state

        def act(carry, _):
            envs, obs, key = carry
            key, of_act, of_step = jax.random.split(key, 3)
            out, value = self.policy(weights, obs)
            if self.discrete:
                action = jax.random.categorical(of_act, out)
            else:
                action = out + jnp.exp(weights["log_std"]) * jax.random.normal(of_act, out.shape)
            next_obs, envs, reward, done = self.step(of_step, envs, action)
            row = (obs, action, self.log_prob(weights, out, action), value, reward, done)
            return (envs, next_obs, key), row

        (envs, obs, key), rows = jax.lax.scan(act, (envs, obs, key), None, self.steps)
        states, actions, log_probs, values, rewards, dones = rows
        last = self.policy(weights, obs)[1]

        def backwards(carry, row):
            advantage, after = carry
            value, reward, done = row
            delta = reward + c["gamma"] * after * (1 - done) - value
            advantage = delta + c["gamma"] * self.lam * (1 - done) * advantage
            return (advantage, value), advantage

        _, advantages = jax.lax.scan(backwards, (jnp.zeros_like(last), last), (values, rewards, dones), reverse=True)
        flat = [
            x.reshape(self.each, *x.shape[2:]) for x in (states, actions, log_probs, advantages, advantages + values)
        ]

        def loss(weights, states, actions, log_probs, advantages, targets):
            out, value = self.policy(weights, states)
            a = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
            ratio = jnp.exp(self.log_prob(weights, out, actions) - log_probs)
            gain = jnp.minimum(ratio * a, ratio.clip(0.8, 1.2) * a).mean()
            return 0.5 * ((value - targets) ** 2).mean() - gain

        def minibatch(carry, rows):
            weights, adam = carry
            updates, adam = self.adam.update(jax.grad(loss)(weights, *(x[rows] for x in flat)), adam)
            return (optax.apply_updates(weights, updates), adam), None

        key, of_order = jax.random.split(key)
        orders = jax.vmap(jax.random.permutation, (0, None))(jax.random.split(of_order, self.epochs), self.each)
        (weights, adam), _ = jax.lax.scan(minibatch, (weights, adam), orders.reshape(-1, c["batch"]))
        return weights, adam, envs, obs, key


class DQN(Training):
    def begin(self):
        c, options = self.case, self.case["jax"]
        self.steps, self.updates, self.every = options["n_steps"], options["updates"], options["target_every"]
        self.length = options["buffer"] // self.n
        self.adam = optax.chain(optax.clip_by_global_norm(10.0), optax.adam(c["lr"]))
        one, self.key = jax.random.split(self.key)
        weights = layers(one, [self.size, *c["hidden"], self.width])
        rows = (self.length, self.n)
        obs = jnp.zeros((*rows, self.size))
        replay = {"obs": obs, "next": jnp.copy(obs), "reward": jnp.zeros(rows), "action": jnp.zeros(rows, jnp.int32),
                  "done": jnp.zeros(rows)}  # fmt: skip
        self.state = (weights, jax.tree.map(jnp.copy, weights), self.adam.init(weights), self.envs, self.obs, replay,
                      jnp.zeros((), jnp.int32), self.key)  # fmt: skip

    def iterate(self, state):
        c = self.case
        weights, target, adam, envs, obs, replay, count, key = state

        def act(carry, t):
            envs, obs, replay, key = carry
            key, of_choice, of_action, of_step = jax.random.split(key, 4)
            best = run(weights, obs, self.activation).argmax(-1)
            some = jax.random.randint(of_action, (self.n,), 0, self.width)
            action = jnp.where(jax.random.uniform(of_choice, (self.n,)) < 0.05, some, best)
            next_obs, envs, reward, done = self.step(of_step, envs, action)
            row = {"obs": obs, "next": next_obs, "reward": reward, "action": action, "done": done.astype(jnp.float32)}
            at = (count + t) % self.length
            replay = {
                k: jax.lax.dynamic_update_index_in_dim(x, row[k].astype(x.dtype), at, 0) for k, x in replay.items()
            }
            return (envs, next_obs, replay, key), None

        (envs, obs, replay, key), _ = jax.lax.scan(act, (envs, obs, replay, key), jnp.arange(self.steps))
        count = count + self.steps
        full = jnp.minimum(count, self.length)
        due = count * self.n // self.every > (count - self.steps) * self.n // self.every
        target = jax.tree.map(lambda a, b: jnp.where(due, a, b), weights, target)

        def loss(weights, batch):
            q = jnp.take_along_axis(run(weights, batch["obs"], self.activation), batch["action"][:, None], -1)[:, 0]
            after = run(target, batch["next"], self.activation).max(-1)
            return optax.huber_loss(q, batch["reward"] + c["gamma"] * (1 - batch["done"]) * after).mean()

        def update(carry, key):
            weights, adam = carry
            of_time, of_env = jax.random.split(key)
            t = jax.random.randint(of_time, (c["batch"],), 0, full)
            i = jax.random.randint(of_env, (c["batch"],), 0, self.n)
            gradient = jax.grad(loss)(weights, {k: x[t, i] for k, x in replay.items()})
            updates, adam = self.adam.update(gradient, adam)
            return (optax.apply_updates(weights, updates), adam), None

        key, of_updates = jax.random.split(key)
        (weights, adam), _ = jax.lax.scan(update, (weights, adam), jax.random.split(of_updates, self.updates))
        return weights, target, adam, envs, obs, replay, count, key
