"""Parts that all rooms use: checks of arguments, labels, files of strangers, random streams, executors, settings."""
