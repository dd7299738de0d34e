"""Corpus, tokenizer, packing, loader, prefetch."""
