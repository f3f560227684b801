"""Several tokens from one pass: draft tokens, verified by the model."""
