"""Proving operator rules: samples of every operator, and the machine that splits them in every way a rule allows."""

from tutti.check.machine import Report, check, prove
from tutti.check.samples.sample import SAMPLES, Sample, samples

__all__ = ["SAMPLES", "Report", "Sample", "check", "prove", "samples"]
