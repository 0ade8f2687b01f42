"""A federation whose parties run in processes of their own."""
