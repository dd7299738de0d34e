"""The engine: requests, sequences, scheduling, steps and sampling."""
