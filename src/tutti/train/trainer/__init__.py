"""`tutti.Trainer`: the interface of `transformers.Trainer` over `tutti.parallelize`."""
