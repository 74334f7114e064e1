"""Models in the form of Hugging Face's transformers: tokenizer files, modelling code, model card, check."""
