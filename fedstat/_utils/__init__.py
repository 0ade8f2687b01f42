"""Tools of all subpackages: argument checks, labels, untrusted files, random streams, executors, settings."""
