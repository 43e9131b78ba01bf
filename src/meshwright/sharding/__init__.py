"""How a value lies over a mesh, what moving it costs in collectives, and how an operator may be split."""

from .algorithm import (
    Algorithm as Algorithm,
    Splits as Splits,
    algorithm_of as algorithm_of,
    algorithms as algorithms,
    algorithms_in as algorithms_in,
    shared_algorithms_in as shared_algorithms_in,
    splits_of as splits_of,
    with_broadcast as with_broadcast,
)
from .conversion import Conversion as Conversion, Step as Step, convert as convert
from .spec import Spec as Spec
