"""Runtimes: execute Programs and collectives on the ranks of this process."""
