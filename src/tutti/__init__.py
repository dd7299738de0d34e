"""Lift a PyTorch model written for one device to any number of devices with one line."""

from tutti.cluster import Cluster as Cluster
from tutti.graph.capture import capture as capture
from tutti.graph.step_graph import StepGraph as StepGraph
from tutti.plan.layout import Layout as Layout
from tutti.plan.pin import pin as pin
from tutti.plan.plan import Plan as Plan
from tutti.plan.random import random_plan as random_plan
from tutti.run.step import Step as Step
from tutti.run.step import parallelize as parallelize
