"""Forward models: fields and responses of sections and of layered earths."""
