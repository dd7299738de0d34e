"""The verbs `tutti plan` and `tutti dryrun`."""
