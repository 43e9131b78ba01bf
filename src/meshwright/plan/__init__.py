"""The Plan: everything needed to run a program on a cluster, and nothing of how it was found. Frozen data."""

from ..errors import PlanError as PlanError
from .io import load_plan as load_plan
from .io import save_plan as save_plan
from .plan import Collective as Collective
from .plan import InputPlan as InputPlan
from .plan import Memory as Memory
from .plan import OperatorPlan as OperatorPlan
from .plan import ParameterPlan as ParameterPlan
from .plan import Plan as Plan
from .plan import Prediction as Prediction
from .plan import Stage as Stage
