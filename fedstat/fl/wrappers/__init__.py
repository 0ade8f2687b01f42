"""Wrappers that turn a network or an algorithm into another: mixtures, fine-tuned or shrunken models."""
