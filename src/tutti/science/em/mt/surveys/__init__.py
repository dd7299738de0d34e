"""Survey data: observations, EDI and data files, synthetic surveys and truths."""
