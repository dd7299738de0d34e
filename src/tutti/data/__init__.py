"""Text data: corpus, tokenizer, packing, loader, prefetch."""
