"""Measurements beside training: each probe is an observer with groups of its own in the run's store."""
