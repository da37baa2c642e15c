"""Faces over the workbench that run in a browser."""
