"""The recipe of longreach-mini: corpus, tokenizer, model, batches, training loop, evaluation."""
