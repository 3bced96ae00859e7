"""Real but tiny stand-ins for tests: models of each family, a tokenizer, links that fail."""
