"""The verb `tutti plan` and its modes."""
