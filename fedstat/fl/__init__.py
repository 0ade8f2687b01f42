"""The trainer: all clients in one tensor program."""
