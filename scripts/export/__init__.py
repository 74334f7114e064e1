"""Export a run to transformers: weights, tokenizer files, modelling code, model card, check."""
