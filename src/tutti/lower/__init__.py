"""Lower a graph and a plan to one Program per rank."""
