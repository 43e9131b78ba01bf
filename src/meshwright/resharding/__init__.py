"""Moving tensors between meshes: data slices, unit tasks, lower bounds, fractional senders, relays, rounds.

`plan_reshard` plans a whole set of tensors at once; `round_messages` says what that is on devices. No JAX here.
"""

from .bound import Bound as Bound, lower_bound as lower_bound
from .check import check_transfers as check_transfers, deliver as deliver
from .cost import MoveCosts as MoveCosts, cluster_network as cluster_network
from .errors import ReshardError as ReshardError
from .layout import DeviceMesh as DeviceMesh, Layout as Layout, grid_layout as grid_layout
from .messages import (
    Message as Message,
    Piece as Piece,
    RoundMessages as RoundMessages,
    local_messages as local_messages,
    round_messages as round_messages,
)
from .multicast import multicast as multicast
from .network import Host as Host, Network as Network, Nic as Nic, uniform_network as uniform_network
from .plan import ReshardPlan as ReshardPlan
from .planner import plan_reshard as plan_reshard
from .simulate import plan_fluid_seconds as plan_fluid_seconds
from .tasks import Demand as Demand, Move as Move, demand_of as demand_of
