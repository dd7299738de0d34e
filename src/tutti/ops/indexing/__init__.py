"""Rules of operators that read or write by index: gather, scatter, slices, embeddings."""
