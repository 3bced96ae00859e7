"""The receiver daemon: takes a cache in and answers from it."""
