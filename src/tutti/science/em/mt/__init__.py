"""Magnetotellurics: forward models, data, priors and inversion."""

from tutti.science.em.mt.data import Data as Data
from tutti.science.em.mt.edi import read_edi as read_edi
from tutti.science.em.mt.edi import survey as survey
from tutti.science.em.mt.forward import MT2D as MT2D
from tutti.science.em.mt.forward import Linearization as Linearization
from tutti.science.em.mt.layered import layered as layered
from tutti.science.em.mt.layered import log_resistivity as log_resistivity
from tutti.science.em.mt.mesh import Mesh2D as Mesh2D
from tutti.science.em.mt.mesh import graded as graded
from tutti.science.em.mt.mesh import skin_depth as skin_depth
