"""Meaning of prompts and outputs: tokenizer, chat template, output channels, tool calls."""
