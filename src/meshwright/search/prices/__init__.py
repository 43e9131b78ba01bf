"""Seconds of what a stage does on one logical mesh: operators in each of their choices, conversions, parameters."""
