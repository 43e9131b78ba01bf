"""Ranges of layers as stages: seconds and bytes on a submesh, estimated from parts or solved."""
