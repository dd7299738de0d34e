"""The training job: config, loop, report."""
