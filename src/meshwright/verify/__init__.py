"""`verify`: what a plan predicts beside what its compiled programs do, and its numbers beside those of one device."""

from __future__ import annotations

from ..compilers.facts import (
    Sent as Sent,
    StageFacts as StageFacts,
    Traffic as Traffic,
    compiled_traffic as compiled_traffic,
)
from .numbers import LeafError as LeafError, leaf_error as leaf_error
from .run import local_cluster as local_cluster, verify as verify
from .verification import Check as Check, Planned as Planned, Verification as Verification
