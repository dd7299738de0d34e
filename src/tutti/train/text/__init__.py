"""Training runs on text: config, preparation, progress, report."""
