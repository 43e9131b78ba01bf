"""Ranges of layers as stages: what one takes and holds on a submesh, estimated from its parts or solved."""
