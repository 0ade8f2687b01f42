"""fedstat: statistics of personalised federated learning."""
