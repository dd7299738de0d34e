"""Peers of `fdtd.py`: a library advances a 3-D grid or takes gradients, in an environment of its own (`harness.Peer`).

    python fdtd_peers.py LIBRARY CELLS LAYERS THREADS

Reads a number of steps for each turn, a line of JSON, and answers with [cell-steps, seconds] (or [gradients, seconds]).
"""

import json
import os
import sys
import time


def main(library: str, *args: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    advance = LIBRARIES[library](*(int(x) for x in args))
    advance(1)
    for line in sys.stdin:
        steps = json.loads(line)
        begin = time.perf_counter()
        done = advance(steps)
        print(json.dumps([done, time.perf_counter() - begin]), file=answers, flush=True)


def ours(cells: int, layers: int, threads: int):
    import torch

    from tutti.science.em.fdtd import CPML, Current, Grid, Simulation, gaussian_up_to
    from tutti.science.em.fdtd.stepping import kernels

    torch.set_num_threads(threads)
    grid = Grid((cells,) * 3, 0.01)
    source = Current("Ez", (cells // 2,) * 3, gaussian_up_to(1e9))
    simulation = Simulation(grid, CPML(layers) if layers else None, [source])
    problem, waves, _, _ = simulation.prepare(1 + torch.rand(grid.shape), 200, None, 1.0, None, (), None)
    state = problem.state()

    def advance(steps: int) -> float:
        kernels.forward(problem, state, waves, (), 0, steps)
        return grid.cells * steps

    return advance


def fdtdx(cells: int, layers: int, threads: int):
    """As its documentation runs it: the whole loop under jit. Layers of 0 are not measured."""
    import fdtdx as library
    import jax

    delta = 0.01
    step = 0.99 * delta / (299792458.0 * 3**0.5)
    compiled = {}

    def prepare(steps: int):
        config = library.SimulationConfig(time=(steps + 0.5) * step, grid=library.UniformGrid(spacing=delta),
                                          backend="cpu")  # fmt: skip
        volume = library.SimulationVolume(partial_grid_shape=(cells,) * 3)
        bound = library.BoundaryConfig.from_uniform_bound(thickness=layers)
        boundaries, constraints = library.boundary_objects_from_config(bound, volume)
        key = jax.random.PRNGKey(0)
        objects, arrays, params, config, _ = library.place_objects(
            [volume, *boundaries.values()], config, constraints, key
        )
        arrays, objects, _ = library.apply_params(arrays, objects, params, key)
        run = jax.jit(lambda x: library.run_fdtd(x, objects, config, key, show_progress=False))
        jax.block_until_ready(run(arrays))
        return run, arrays, config.time_steps_total

    def advance(steps: int) -> float:
        if steps not in compiled:
            compiled[steps] = prepare(steps)
        run, arrays, done = compiled[steps]
        jax.block_until_ready(run(arrays))
        return cells**3 * done

    return advance


def adjoint(epochs: int, layers: int, threads: int):
    """Gradients of the inverse-scattering example."""
    import torch

    from tutti.science.em.fdtd import inverse

    torch.set_num_threads(threads)
    simulation, rho = inverse.scene(), torch.zeros(40, 40, requires_grad=True)
    labels = simulation.run(inverse.truth(), inverse.STEPS)["received"]

    def advance(count: int) -> float:
        for _ in range(count):
            received = simulation.run(inverse.permittivity(rho), inverse.STEPS)["received"]
            (received - labels).square().sum().backward()
        return count

    return advance


def autograd(epochs: int, layers: int, threads: int):
    """The same by a plain PyTorch loop under autograd: Yee with CPML as slices of tensors, as a user would write it."""
    import torch

    from tutti.science.em.fdtd import inverse

    torch.set_num_threads(threads)
    simulation, rho = inverse.scene(), torch.zeros(40, 40, requires_grad=True)
    labels = simulation.run(inverse.truth(), inverse.STEPS)["received"]
    lines = [[(w, *(torch.zeros(101).masked_scatter_(x.at >= 0, y.float()) for y in (x.decay, x.drive)))
              for x in (side[0], side[2]) for w in (x.w.float(),)] for side in simulation.lines]  # fmt: skip
    columns = [[tuple(y[:, None] for y in side[0]), tuple(y[None] for y in side[1])] for side in lines]

    def advance(count: int) -> float:
        for _ in range(count):
            problem, waves, parameters, _ = simulation.prepare(
                inverse.permittivity(rho), inverse.STEPS, None, 1.0, None, (), None)  # fmt: skip
            b, bh = parameters[1][:, 0], [float(problem.b[3]), float(problem.b[5])]
            inner = torch.zeros(101, 101)
            inner[1:-1, 1:-1] = 1
            e, hx, hy = (torch.zeros(4, 101, 101) for _ in range(3))
            px, py, qx, qy = (torch.zeros(4, 101, 101) for _ in range(4))
            places = torch.tensor(inverse.TRANSMITTERS)
            mask = torch.zeros(4, 101, 101)
            mask[range(4), places[:, 0], places[:, 1]] = 1
            receivers, out = torch.tensor(inverse.RECEIVERS).T, []
            pad = torch.nn.functional.pad
            for step in range(inverse.STEPS):
                (wx, dx, rx), (wy, dy, ry) = columns[1]
                cx, cy = wx * pad(e[:, 1:] - e[:, :-1], (0, 0, 0, 1)), wy * pad(e[..., 1:] - e[..., :-1], (0, 1))
                px, py = dx * px + rx * cx, dy * py + ry * cy
                hy, hx = hy + bh[0] * (cx + px), hx - bh[1] * (cy + py)
                (wx, dx, rx), (wy, dy, ry) = columns[0]
                cx, cy = wx * pad(hy[:, 1:] - hy[:, :-1], (0, 0, 1, 0)), wy * pad(hx[..., 1:] - hx[..., :-1], (1, 0))
                qx, qy = dx * qx + rx * cx, dy * qy + ry * cy
                e = e + b * inner * (cx + qx - cy - qy - mask * waves[step, 0])
                out.append(e[:, receivers[0], receivers[1]])
            loss = (torch.stack(out, 1) - labels).square().sum()
            loss.backward()
        assert abs(float(loss.detach()) - 0.2114370) < 1e-5, float(loss.detach())
        return count

    return advance


LIBRARIES = {"ours": ours, "fdtdx": fdtdx, "adjoint": adjoint, "autograd": autograd}

if __name__ == "__main__":
    main(*sys.argv[1:])
