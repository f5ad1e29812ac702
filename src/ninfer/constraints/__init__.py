"""Output constraints: a text language becomes a grammar over tokens. Knows bytes and tokens, not models."""
