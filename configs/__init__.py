"""YAML presets and their prompt files, shipped as package data."""
