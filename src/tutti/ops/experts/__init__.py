"""Rules of mixtures of experts: dropless experts, their exchange, and slots of a fixed capacity."""
