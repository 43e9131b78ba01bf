"""How a value lies over a mesh, what moving it costs in collectives, and how an operator may be split."""

from .algorithm import (
    Algorithm as Algorithm,
    algorithm_of as algorithm_of,
    algorithms as algorithms,
    shared_algorithms as shared_algorithms,
    with_broadcast as with_broadcast,
)
from .conversion import Conversion as Conversion, Step as Step, convert as convert
from .spec import Spec as Spec
