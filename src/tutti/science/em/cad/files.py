"""Solids from files: STEP, IGES and BREP through gmsh, STL, OBJ, PLY, OFF and 3MF through trimesh."""

from __future__ import annotations

import re
import signal
from contextlib import suppress
from math import inf
from numbers import Real
from pathlib import Path

import numpy as np

from tutti.science.em.cad.solids import Mesh

PARAMETRIC = (".step", ".stp", ".iges", ".igs", ".brep")
TRIANGLES = (".stl", ".obj", ".ply", ".off", ".3mf")


def read(path: str | Path, *, unit: float = 1e-3, angle: float = 32) -> dict[str, Mesh]:
    """The solids of a file by name. unit: metres of a unit of a file of triangles, by default a millimetre; STEP, IGES
    and BREP files say their own. angle: triangles of a full turn of a curved face.

    Raises FileNotFoundError without a file, and ValueError for an unknown format or a surface that is not closed.
    """
    path = Path(path)
    if not isinstance(unit, Real) or not 0 < unit < inf:
        raise ValueError(f"unit: metres of a unit of the file, 1e-3 for millimetres, not {unit!r}")
    if not path.exists():
        raise FileNotFoundError(f"there is no file {path}")
    kind = path.suffix.lower()
    if kind in PARAMETRIC:
        solids, unit = _parametric(path, angle), 1e-3  # gmsh converts to millimetres
    elif kind in TRIANGLES:
        solids = _triangles(path)
    else:
        raise ValueError(f"{path.name} has no known format; known are {', '.join(PARAMETRIC + TRIANGLES)}")
    if not solids:
        raise ValueError(f"{path.name} holds no solid")
    return {name: Mesh(vertices * unit, faces, f"{name} of {path.name}") for name, (vertices, faces) in solids.items()}


def _triangles(path: Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    import trimesh

    scene, solids = trimesh.load_scene(path), {}
    for node in scene.graph.nodes_geometry:
        place, name = scene.graph[node]
        mesh = scene.geometry[name]
        if isinstance(mesh, trimesh.Trimesh):
            vertices = trimesh.transform_points(mesh.vertices, place)
            solids[name if name not in solids else node] = (vertices, np.asarray(mesh.faces))
    return solids


def _parametric(path: Path, angle: float) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    import gmsh

    _initialize()
    try:
        gmsh.option.setNumber("General.Verbosity", 1)
        gmsh.option.setString("Geometry.OCCTargetUnit", "MM")
        gmsh.model.occ.importShapes(str(path))
        gmsh.model.occ.synchronize()
        gmsh.option.setNumber("Mesh.MeshSizeFromCurvature", angle)
        gmsh.model.mesh.generate(2)
        tags, points = (np.asarray(each) for each in gmsh.model.mesh.getNodes()[:2])
        place = np.zeros(int(tags.max(initial=0)) + 1, np.int64)
        place[tags] = np.arange(len(tags))
        points = points.reshape(-1, 3)
        solids = {}
        for _, body in gmsh.model.getEntities(3):
            label = gmsh.model.getEntityName(3, body).rpartition("/")[2]
            name = re.sub(r"\W+", "_", label) or f"solid{body}"
            name = name if name not in solids else f"{name}_{body}"
            faces = []
            for _, face in gmsh.model.getBoundary([(3, body)]):  # a negative tag: the face points inwards
                _, _, nodes = gmsh.model.mesh.getElements(2, abs(face))
                triangles = place[np.concatenate(nodes)].reshape(-1, 3)
                faces.append(triangles if face > 0 else triangles[:, ::-1])
            solids[name] = (points, np.concatenate(faces))
        return solids
    except Exception as error:
        if isinstance(error, ValueError):
            raise
        raise ValueError(f"gmsh cannot read {path.name}: {error}") from error
    finally:
        gmsh.finalize()


def _initialize() -> None:
    """Initialize gmsh. It makes SIGPIPE end the process: writing to a closed socket would end Python without a word."""
    import gmsh

    gmsh.initialize(interruptible=False)
    with suppress(ValueError):  # only the main thread may
        signal.signal(signal.SIGPIPE, signal.getsignal(signal.SIGPIPE))
