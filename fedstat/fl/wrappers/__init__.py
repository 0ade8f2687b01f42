"""Wrappers, which turn a network or a method into another: mixtures, fine-tuned or shrunken models."""
