"""How a value lies over a mesh, what moving it costs in collectives, and how an operator may be split."""

from .algorithm import Algorithm as Algorithm
from .algorithm import algorithm_of as algorithm_of
from .algorithm import algorithms as algorithms
from .algorithm import shared_algorithms as shared_algorithms
from .algorithm import with_broadcast as with_broadcast
from .conversion import Conversion as Conversion
from .conversion import Step as Step
from .conversion import convert as convert
from .spec import Spec as Spec
