"""From CAD to tensors: solids, files, materials and voxels with exact fill fractions along rays."""

from tutti.extras import extra

with extra("science"):
    from tutti.science.em.cad.files import read
    from tutti.science.em.cad.materials import MATERIALS, Material, material
    from tutti.science.em.cad.solids import Mesh, Solid, box, cone, cylinder, sphere
    from tutti.science.em.cad.voxels import Voxels, fill, voxelize

__all__ = [
    "MATERIALS",
    "Material",
    "Mesh",
    "Solid",
    "Voxels",
    "box",
    "cone",
    "cylinder",
    "fill",
    "material",
    "read",
    "sphere",
    "voxelize",
]
