"""From CAD to tensors: solids, files, materials and voxels with exact fill fractions along rays."""

from tutti.science.em.cad.files import read as read
from tutti.science.em.cad.materials import MATERIALS as MATERIALS
from tutti.science.em.cad.materials import Material as Material
from tutti.science.em.cad.materials import material as material
from tutti.science.em.cad.solids import Mesh as Mesh
from tutti.science.em.cad.solids import Solid as Solid
from tutti.science.em.cad.solids import box as box
from tutti.science.em.cad.solids import cone as cone
from tutti.science.em.cad.solids import cylinder as cylinder
from tutti.science.em.cad.solids import sphere as sphere
from tutti.science.em.cad.voxels import Voxels as Voxels
from tutti.science.em.cad.voxels import fill as fill
from tutti.science.em.cad.voxels import voxelize as voxelize
