"""The search for the best plan: meshes, named plans, pipelines, recomputation, offloading."""
