"""Updates of optimizers, one family in each file. Importing the modules registers them."""
