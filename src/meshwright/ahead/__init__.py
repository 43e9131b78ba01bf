"""A second process for planning: a copy of this one, that works ahead of it (`copied`) or on the same (`shared`)."""

from __future__ import annotations

from .copied import Ahead, is_copy
from .post import Post
from .shared import Begun, in_two

__all__ = ["Ahead", "Begun", "Post", "in_two", "is_copy"]
