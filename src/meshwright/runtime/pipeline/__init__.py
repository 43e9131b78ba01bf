"""Stages that run one after the other on submeshes of their own, microbatch by microbatch, by a schedule."""
