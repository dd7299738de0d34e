"""The parts of a pipeline, and the actions of its devices."""
