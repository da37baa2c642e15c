"""Faults that are planted on purpose, each in a copy, a child process or ranks that end with the proof."""
