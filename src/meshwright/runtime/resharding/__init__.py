"""Moving arrays between meshes: the rounds that `meshwright.resharding` plans, run on devices."""

from .reshard import reshard as reshard, reshard_plan as reshard_plan
