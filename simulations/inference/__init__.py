"""What fedstat's p values and intervals are worth: level and coverage in simulations with known truth."""
