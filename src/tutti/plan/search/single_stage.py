"""The search of plans without pipelines: meshes of one to three axes, and numbers of microbatches.

Microbatches make a step smaller, never faster. More of them are tried while the fastest plan that fits is slower than
a plan that does not fit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from tutti.plan.explain import mesh_name
from tutti.plan.layouts.layout import Mesh
from tutti.plan.planner import Candidate, Planner
from tutti.plan.textbook import Textbook

if TYPE_CHECKING:
    from tutti.plan.search.search import Search

SHARE = 0.6  # of the budget after which pipelines, if possible, are tried
NEAR = 1.02  # modelled and judged times agree within this factor
DEEPER = 30  # a mesh of three axes takes at most this many times the work of one of two
SHRINKING = ("activations", "temporaries", "communication")  # kinds of memory that microbatches reduce


class Flat:
    """Searches the plans without pipelines of a `Search`."""

    def __init__(self, search: Search):
        self.of = search

    def search(self) -> None:
        """Search plans without pipelines, within the budget."""
        search = self.of
        if search.pipes.possible:
            search.deadline = SHARE * search.budget
        count = search.accumulate or (1 if search.fastest is None else search.best_of_all.accumulate)
        while count and not (search.late and search.fastest is not None):
            candidates = list(self.look(search.planner(count)))
            search.candidates += candidates
            if not search.candidates and search.impossible:
                raise search.impossible
            search.consider(candidates)
            count = self.more(count, candidates)
        if search.fastest is not None:
            self.deeper()

    def look(self, planner: Planner) -> Iterator[Candidate]:
        """The candidates of all meshes of one or two axes, or of the given mesh, and the textbook plans."""
        search = self.of
        many = f" with {planner.accumulate} microbatches" if planner.accumulate > 1 else ""
        meshes = self.meshes(planner)
        if search.plans:  # start with the best mesh so far
            meshes.sort(key=lambda mesh: list(mesh.items()) != list(search.best_of_all.mesh.items()))
        for i, mesh in enumerate(meshes):
            if search.late and (i or search.fastest is not None):
                search.left += len(meshes) - i
                return
            search.progress(f"mesh {mesh_name(mesh)}{many} ({i + 1} of {len(meshes)})")
            try:
                yield search.candidate(planner, mesh, len(meshes) - i)
            except ValueError as error:  # a pin is not possible on this mesh
                search.impossible = error
        if not search.mesh and not search.late:
            search.progress("textbook plans")
            yield from planner.references()

    def deeper(self) -> None:
        """Search meshes of three axes within the budget. The outermost axis is the nodes, or two halves of a node."""
        search = self.of
        n, node = search.cluster.size, search.cluster.levels[0][0]
        planner = search.planner(search.best_of_all.accumulate)
        outer = n // node if node < n else 2
        if n % outer or planner.pins or search.mesh:
            return
        for k in range(2, n // outer):
            if (n // outer) % k or search.work.seconds + DEEPER * max(search.took, default=0.0) > search.deadline:
                continue
            mesh = {"dp": outer, "cp": n // outer // k, "tp": k}
            search.progress(f"mesh {mesh_name(mesh)}")
            candidate = search.candidate(planner, mesh)
            search.candidates.append(candidate)
            search.consider([candidate])

    def meshes(self, planner: Planner) -> list[Mesh]:
        """All meshes of one or two axes that have the pinned axes, or only the given mesh."""
        search = self.of
        if search.mesh:
            return [search.mesh]
        n = search.cluster.size
        all_meshes: list[Mesh] = [Textbook(n // k, k).mesh for k in range(1, n + 1) if n % k == 0]
        if n > 1 and not planner.pins:
            all_meshes.pop()  # the same single axis under another name
        pinned = {axis for axes in planner.pins.values() for axis in axes}
        with_pins = [mesh for mesh in all_meshes if pinned <= set(mesh)]
        if not with_pins:
            raise ValueError(
                f"no mesh of {n} devices has all the axes that pins name, {sorted(pinned)}; without a given mesh the "
                "axes are 'dp' and 'tp'"
            )
        return with_pins

    def more(self, count: int, candidates: Sequence[Candidate]) -> int:
        """The next number of microbatches to try; 0 if there is none."""
        search = self.of
        least, fastest = min((c.bound for c in candidates), default=0.0), search.fastest
        if search.accumulate is not None or (search.late and fastest is not None):
            return 0
        smallest = min((p for p in search.plans if p.accumulate == count), key=search.rank, default=None)
        if smallest is None or (fastest and fastest <= NEAR * search.fused * least):
            return 0
        over = smallest.predicted.peak_bytes - search.memory
        shrinks = sum(smallest.predicted.bytes_by_kind.get(kind, 0) for kind in SHRINKING)
        if over >= shrinks:
            return 0
        wanted = max(2.0, shrinks / (shrinks - over)) * count
        more = [n for n in range(count + 1, search.batch + 1) if search.batch % n == 0]
        return next((n for n in more if n >= wanted), more[-1] if more else 0)
