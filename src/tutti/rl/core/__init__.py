"""What all algorithms share: agents, environments, rollouts, files."""
