"""Cost networks: the planning problem as variables and pairs, and how it is minimized."""
